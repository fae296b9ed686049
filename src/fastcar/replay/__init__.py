"""Cache attentive replay: when an MLP's output of the frame before may stand for this frame's (arXiv 2505.14709)."""

from fastcar.replay.config import ReplayConfig
from fastcar.replay.trace import ReplayStats, ReplayTrace

__all__ = ["ReplayConfig", "ReplayStats", "ReplayTrace"]

"""FastCar: fast auto-regressive video generation with cache attentive replay."""

from fastcar.pipeline import Clip, ClipStats, Pipeline, load
from fastcar.replay import ReplayConfig, ReplayStats, ReplayTrace

__all__ = ["Clip", "ClipStats", "Pipeline", "ReplayConfig", "ReplayStats", "ReplayTrace", "__version__", "load"]
__version__ = "0.1.0"

"""FastCar: fast auto-regressive video generation with cache attentive replay."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastcar.decoder.kv_cache import AttentionConfig
    from fastcar.pipeline import Clip, ClipStats, Pipeline, load
    from fastcar.replay import ReplayConfig, ReplayStats, ReplayTrace

__all__ = [
    "AttentionConfig",
    "Clip",
    "ClipStats",
    "Pipeline",
    "ReplayConfig",
    "ReplayStats",
    "ReplayTrace",
    "__version__",
    "load",
]
__version__ = "0.1.0"

_HOMES = dict.fromkeys(("Clip", "ClipStats", "Pipeline", "load"), "fastcar.pipeline")
_HOMES["AttentionConfig"] = "fastcar.decoder.kv_cache"
_HOMES |= dict.fromkeys(("ReplayConfig", "ReplayStats", "ReplayTrace"), "fastcar.replay")


def __getattr__(name: str) -> Any:
    """Import on first use: PyTorch takes seconds, and ``fastcar --help`` needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fastcar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""FastCar: fast auto-regressive video generation with cache attentive replay."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastcar import replay
    from fastcar.decoder.kv_cache import AttentionConfig
    from fastcar.integrations.adapters import DecoderAdapter
    from fastcar.integrations.transformers import disable, enable, stats, trace
    from fastcar.pipeline import Clip, ClipStats, Pipeline, load
    from fastcar.replay import ReplayConfig, ReplayStats, ReplayTrace

__all__ = [
    "AttentionConfig",
    "Clip",
    "ClipStats",
    "DecoderAdapter",
    "Pipeline",
    "ReplayConfig",
    "ReplayStats",
    "ReplayTrace",
    "__version__",
    "disable",
    "enable",
    "load",
    "replay",
    "stats",
    "trace",
]
__version__ = "0.1.0"

_HOMES = dict.fromkeys(("Clip", "ClipStats", "Pipeline", "load"), "fastcar.pipeline")
_HOMES["AttentionConfig"] = "fastcar.decoder.kv_cache"
_HOMES["DecoderAdapter"] = "fastcar.integrations.adapters"
_HOMES |= dict.fromkeys(("disable", "enable", "stats", "trace"), "fastcar.integrations.transformers")
_HOMES |= dict.fromkeys(("ReplayConfig", "ReplayStats", "ReplayTrace"), "fastcar.replay")


def __getattr__(name: str) -> Any:
    """Import on first use: PyTorch takes seconds, and ``fastcar --help`` needs none of it."""
    if name == "replay":
        return import_module("fastcar.replay")
    if name not in _HOMES:
        raise AttributeError(f"module 'fastcar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

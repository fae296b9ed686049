"""Cache attentive replay: when an MLP's output of the frame before may stand for this frame's (arXiv 2505.14709).

Called, ``with fastcar.replay(model, config):``, it replays in a Hugging Face model; see
:func:`fastcar.integrations.transformers.replay`.
"""

import sys
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from fastcar.replay.config import ReplayConfig
from fastcar.replay.trace import ReplayStats, ReplayTrace

__all__ = ["ReplayConfig", "ReplayStats", "ReplayTrace"]


class _CallableModule(ModuleType):
    """``fastcar.replay`` is a package, and the name that a user expects of the context manager."""

    def __call__(self, model: Any, config: ReplayConfig, **options: Any) -> AbstractContextManager[Any]:
        from fastcar.integrations.transformers import replay

        return replay(model, config, **options)


sys.modules[__name__].__class__ = _CallableModule

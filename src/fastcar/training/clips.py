"""Where training clips come from: the rendered world, or a user's own folder of captioned videos."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fastcar.training import world

__all__ = ["ClipSource", "WorldClips"]


class ClipSource(Protocol):
    """Captioned clips by number, the same for the same number every time."""

    def __len__(self) -> int: ...

    def get(self, index: int) -> tuple[np.ndarray, str]:
        """Clip ``index``: frames uint8 [F, H, W, 3] and its caption."""
        ...


class WorldClips:
    """Clips of :mod:`fastcar.training.world`, rendered when asked for."""

    def __init__(self, split: str = "train", seed: int = 0, count: int = 1_000_000) -> None:
        self.split, self.seed, self.count = split, seed, count

    def __len__(self) -> int:
        return self.count

    def get(self, index: int) -> tuple[np.ndarray, str]:
        scene, caption = world.sample(self.split, self.seed, index)
        return world.render(scene), caption

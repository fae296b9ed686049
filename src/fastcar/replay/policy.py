"""Policies: from the scores of one layer to the rows that replay."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig
from fastcar.replay.score import SCORES

__all__ = ["Policy", "TargetRatioPolicy", "ThresholdPolicy", "make_policy"]


class Policy(Protocol):
    """Decides per layer and row. Rows must not influence one another; state belongs to one generation.

    Decisions are made in NumPy on the host: which rows compute must be known there anyway, and a handful of numbers is
    compared several times faster than a tensor of them.
    """

    def decide(self, layer: int, scores: np.ndarray) -> np.ndarray:
        """Scores float32 [B] of one layer to a bool mask [B], True where the row would replay."""
        ...

    def observe(self, scores: np.ndarray, replayed: np.ndarray) -> None:
        """Told at the end of each step that might have replayed: scores [L, B] and what was done, bool [L, B]."""
        ...


class ThresholdPolicy:
    """Replay where the score reaches a fixed threshold, one per layer (the paper's ``tau``).

    Args:
        strict: replay above the threshold only, not at it.
        dtype: of the scores before they became float32; thresholds are rounded to it, as in the official code.
    """

    def __init__(self, thresholds: list[float], strict: bool, dtype: torch.dtype = torch.float32) -> None:
        self.compare = np.greater if strict else np.greater_equal
        self.values = torch.tensor(thresholds, dtype=torch.float64).to(dtype).float().numpy()
        # No score reaches NaN: infinity means never, even for an infinite score.
        self.values[self.values == np.inf] = np.nan

    def decide(self, layer: int, scores: np.ndarray) -> np.ndarray:
        return self.compare(scores, self.values[layer])

    def observe(self, scores: np.ndarray, replayed: np.ndarray) -> None:
        pass


class TargetRatioPolicy:
    """Meet a target ratio by steering every row's thresholds while it generates.

    The threshold of a layer is a quantile of the row's own scores over the last frame, so no scale need be known
    beforehand and every layer replays its share. A quantile alone overshoots, because a replayed token stays still
    and earns more replay; therefore the share asked for is the target plus what the layer owes so far,
    spread over the next eighth of a frame.

    Args:
        ratios: the share of each layer's MLPs to replay, 0..1.
        rows: rows of the batch (B).
        window: scores remembered per layer and row; one frame is the natural choice, 256 are always enough.
    """

    def __init__(self, ratios: list[float], rows: int, window: int) -> None:
        self.ratios = np.array(ratios, np.float32)[:, None]
        self.recent = np.full((window, len(ratios), rows), np.nan, np.float32)
        self.owed = np.zeros((len(ratios), rows), np.float32)
        self.seen = 0
        self.thresholds = np.full((len(ratios), rows), np.inf, np.float32)

    def decide(self, layer: int, scores: np.ndarray) -> np.ndarray:
        return scores >= self.thresholds[layer]

    def observe(self, scores: np.ndarray, replayed: np.ndarray) -> None:
        window = len(self.recent)
        self.recent[self.seen % window] = scores
        self.seen += 1
        self.owed += self.ratios - replayed
        if self.seen > window and self.seen % max(1, window // 16):
            return  # quantiles of a whole frame change slowly
        share = (self.ratios + self.owed / max(1, window // 8)).clip(0, 1) * (self.ratios > 0)
        known = min(self.seen, window)
        ordered = np.sort(self.recent[:known], 0)
        index = np.ceil((1 - share) * known).astype(int)
        picked = np.take_along_axis(ordered, index.clip(max=known - 1)[None], 0)[0]
        self.thresholds = np.where(index >= known, np.inf, np.where(index == 0, -np.inf, picked))


def make_policy(config: ReplayConfig, layers: int, rows: int, geometry: Geometry, dtype: torch.dtype) -> Policy:
    """The policy a config asks for, for a batch of ``rows`` rows of a model that computes in ``dtype``.

    Raises:
        ValueError: the config does not fit the model or the clip.
    """
    config.check(layers, geometry.frames, geometry.tokens_per_frame)
    if config.target_ratio is not None:
        return TargetRatioPolicy(config.layer_ratios(layers), rows, min(geometry.tokens_per_frame, 256))
    score = SCORES[config.score]
    strict = score.strict if config.strict is None else config.strict
    return ThresholdPolicy(config.thresholds(layers), strict, score.dtype or dtype)

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

    A threshold is a quantile of the row's own scores over the last frame, so no scale need be known beforehand. A
    quantile alone overshoots, because a replayed token stays still and earns more replay; therefore the share asked
    for is the target plus what is owed so far, spread over the next frame, or what is left of the last one. It must
    not be paid sooner: what moves takes a few rows of a frame, and there hardly anything may be replayed.

    Args:
        ratios: the share of each layer's MLPs to replay, 0..1.
        rows: rows of the batch (B).
        window: scores remembered per layer and row; one frame is the natural choice, 256 are always enough.
        steps: steps of the clip that may replay; None if that is not known.
        pooled: the ratios are one (or zero) for all layers, and their scores mean the same in each: one threshold and
            one debt for all, so that layers which change more compute more. Else every layer meets its own ratio.
    """

    def __init__(
        self, ratios: list[float], rows: int, window: int, steps: int | None = None, pooled: bool = False
    ) -> None:
        self.ratios = np.array(ratios, np.float32)[:, None]
        steered = [n for n, ratio in enumerate(ratios) if ratio > 0]
        self.groups = np.array([steered] if pooled else [[n] for n in steered], int)  # layers that share a threshold
        self.recent = np.full((window, len(ratios), rows), np.nan, np.float32)
        self.owed = np.zeros((len(self.groups), rows), np.float32)
        self.seen, self.steps = 0, steps or 0
        self.thresholds = np.full((len(ratios), rows), np.inf, np.float32)

    def decide(self, layer: int, scores: np.ndarray) -> np.ndarray:
        return scores >= self.thresholds[layer]

    def observe(self, scores: np.ndarray, replayed: np.ndarray) -> None:
        window = len(self.recent)
        self.recent[self.seen % window] = scores
        self.seen += 1
        if not self.groups.size:
            return
        self.owed += (self.ratios - replayed)[self.groups].mean(1)
        if self.seen > window and self.seen % max(1, window // 16):
            return  # quantiles of a whole frame change slowly
        left = self.steps - self.seen
        spread = min(window, max(left, window // 8, 1)) if left > 0 else window
        share = (self.ratios[self.groups[:, 0]] + self.owed / spread).clip(0, 1)
        ordered = np.swapaxes(self.recent[: self.seen, self.groups], 0, 1)  # [groups, steps, layers of one, B]
        ordered = np.sort(ordered.reshape(len(self.groups), -1, scores.shape[1]), 1)
        count = ordered.shape[1]
        index = np.ceil((1 - share) * count).astype(int)
        picked = np.take_along_axis(ordered, index.clip(max=count - 1)[:, None], 1)[:, 0]
        picked = np.where(index >= count, np.inf, np.where(index == 0, -np.inf, picked))
        self.thresholds[self.groups] = picked[:, None]


def make_policy(config: ReplayConfig, layers: int, rows: int, geometry: Geometry, dtype: torch.dtype) -> Policy:
    """The policy a config asks for, for a batch of ``rows`` rows of a model that computes in ``dtype``.

    Raises:
        ValueError: the config does not fit the model or the clip.
    """
    config.check(layers, geometry.frames, geometry.tokens_per_frame)
    score = SCORES[config.score]
    if config.target_ratio is not None:
        return TargetRatioPolicy(
            config.layer_ratios(layers),
            rows,
            window=min(geometry.tokens_per_frame, 256),
            steps=sum(map(geometry.may_replay, range(geometry.steps))),
            pooled=score.comparable and not isinstance(config.target_ratio, tuple),
        )
    strict = score.strict if config.strict is None else config.strict
    return ThresholdPolicy(config.thresholds(layers), strict, score.dtype or dtype)

"""Policies: from the scores of one layer to the rows that replay."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastcar.replay.config import ReplayConfig
from fastcar.replay.score import SCORES

__all__ = ["Policy", "TargetRatioPolicy", "ThresholdPolicy", "make_policy"]


class Policy(Protocol):
    """Decides per layer and row. Rows must not influence one another; state belongs to one generation."""

    def decide(self, layer: int, scores: Tensor) -> Tensor:
        """Scores [B] of one layer to a bool mask [B], True where the row would replay."""
        ...

    def observe(self, scores: Tensor, replayed: Tensor) -> None:
        """Told at the end of each step that might have replayed: scores [L, B] and what was done, bool [L, B]."""
        ...


class ThresholdPolicy:
    """Replay where the score reaches a fixed threshold, one per layer (the paper's ``tau``)."""

    def __init__(self, thresholds: list[float], strict: bool, device: torch.device | str = "cpu") -> None:
        self.compare = torch.gt if strict else torch.ge
        # No score reaches NaN: infinity means never, even for an infinite score.
        self.values = torch.tensor(thresholds, dtype=torch.float64, device=device)
        self.values[self.values == torch.inf] = torch.nan
        self.rounded = self.values

    def decide(self, layer: int, scores: Tensor) -> Tensor:
        if self.rounded.dtype != scores.dtype:  # compared in the scores' own precision, as in the official code
            self.rounded = self.values.to(scores.dtype)
        return self.compare(scores, self.rounded[layer])

    def observe(self, scores: Tensor, replayed: Tensor) -> None:
        pass


class TargetRatioPolicy:
    """Meet a target ratio by steering every row's thresholds while it generates.

    The threshold of a layer is a quantile of the row's own scores over the last frame, so no scale need be known
    beforehand and every layer replays its share. A quantile alone overshoots, because a replayed token stays still
    and earns more replay; therefore the share asked for is the target plus what is owed so far, spread over
    the next quarter of a frame.

    Args:
        ratios: the share of each layer's MLPs to replay, 0..1.
        rows: rows of the batch (B).
        window: scores remembered per layer and row; one frame is the natural choice.
    """

    def __init__(self, ratios: list[float], rows: int, window: int, device: torch.device | str = "cpu") -> None:
        self.ratios = torch.tensor(ratios, dtype=torch.float32, device=device)[:, None]
        self.recent = torch.full((len(ratios), rows, window), torch.nan, device=device)
        self.active = self.ratios > 0
        self.owed = torch.zeros(rows, device=device)
        self.seen = 0
        self.thresholds = torch.full((len(ratios), rows), torch.inf, device=device)

    def decide(self, layer: int, scores: Tensor) -> Tensor:
        return scores >= self.thresholds[layer]

    def observe(self, scores: Tensor, replayed: Tensor) -> None:
        window = self.recent.shape[-1]
        self.recent[..., self.seen % window] = scores
        self.seen += 1
        self.owed += (self.ratios - replayed.float()).sum(0)
        if self.seen > window and self.seen % max(1, window // 16):
            return  # quantiles of a whole frame change slowly
        share = self.owed / (self.active.sum().clamp(min=1) * max(1, window // 4))
        share = (self.ratios + share).clamp(0, 1) * self.active
        known = min(self.seen, window)
        ordered = self.recent[..., :known].sort(-1).values
        index = ((1 - share) * known).ceil().long()
        picked = ordered.gather(-1, index.clamp(max=known - 1)[..., None])[..., 0]
        self.thresholds = torch.where(index >= known, torch.inf, torch.where(index == 0, -torch.inf, picked))


def make_policy(config: ReplayConfig, layers: int, rows: int, tokens_per_frame: int, device: torch.device) -> Policy:
    """The policy a config asks for, for a batch of ``rows`` rows.

    Raises:
        ValueError: the config does not fit the number of layers.
    """
    config.check(layers)
    if config.target_ratio is not None:
        return TargetRatioPolicy(config.layer_ratios(layers), rows, min(tokens_per_frame, 256), device)
    strict = SCORES[config.score].strict if config.strict is None else config.strict
    return ThresholdPolicy(config.thresholds(layers), strict, device)

"""Do scores know when an MLP may be replayed? Their rank correlation with how little the MLP's output changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from scipy.stats import spearmanr

from fastcar.training.replay_aware import replay_aware_pass

if TYPE_CHECKING:
    from fastcar.models.mini.load import MiniVideoModel
    from fastcar.pipeline import Clip

__all__ = ["score_correlations"]


@torch.no_grad()
def score_correlations(model: MiniVideoModel, clips: list[Clip]) -> dict[str, list[float]]:
    """Spearman correlation, over tokens from the second frame on, of scores with minus the relative output change.

    Clips are fed again in one dense parallel pass, conditional rows only.

    Returns:
        ``tas`` and ``input``: one value for each layer, then one over all layers together.
    """
    words = torch.stack([model.tokenizer.encode(clip.stats.prompt) for clip in clips])
    codes = torch.stack([torch.from_numpy(clip.codes).flatten(0, 1) for clip in clips])
    embeds = model.model.inputs(words, codes)
    run = replay_aware_pass(model.decoder, embeds, words.shape[1], model.config.codec.tokens_per_frame)
    result = {}
    for name, scores in (("tas", run.tas), ("input", run.input)):
        by_layer = [
            float(spearmanr(a.flatten(), -b.flatten()).statistic) for a, b in zip(scores, run.change, strict=True)
        ]
        result[name] = [*by_layer, float(spearmanr(scores.flatten(), -run.change.flatten()).statistic)]
    return result

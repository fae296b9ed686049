"""Scores: how well a token's MLP output of the frame before would serve now. Higher means replay.

Each is computed for one layer and all rows at once, from what the layer has at hand right before its MLP, and from
what was remembered at the aligned position one frame earlier. Scores are given on the host, where it is decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["SCORES", "LayerState", "Score", "temporal_attention_score"]


class LayerState(NamedTuple):
    """What a layer knows of the current position before its MLP, for B rows.

    Attributes:
        query: before rotary embedding, [B, h, 1, d].
        rotated_query: after it, [B, h, 1, d].
        rotated_key: after it, [B, kv heads, 1, d].
        mlp_input: what the MLP would be given, after its norm, [B, H].
        step, layer: where the decoder is.
    """

    query: Tensor
    rotated_query: Tensor
    rotated_key: Tensor
    mlp_input: Tensor
    step: int
    layer: int


@dataclass(frozen=True)
class Score:
    """A score and its manners.

    Attributes:
        name: how users call it.
        source: where it comes from.
        remembers: what must be kept of the last N positions: each position's ``"key"``, or the MLP ``"input"`` that
            produced the output now in the ring.
        strict: whether its source replays above the threshold only.
        comparable: whether a value means the same in every layer, so that one threshold may serve all.
        dtype: in which it is computed; None: the model's.
        compute: ``(state, remembered) -> scores``, float32 [B].
    """

    name: str
    source: str
    remembers: Literal["key", "input"] | None
    strict: bool
    comparable: bool
    dtype: torch.dtype | None
    compute: Callable[[LayerState, Tensor | None], np.ndarray]


def temporal_attention_score(query: Tensor, aligned_key: Tensor) -> Tensor:
    """Mean over heads of ``<q, k> / sqrt(d)``: query [B, h, d] and key [B, kv heads, d] to [B] (paper, section 3)."""
    key = aligned_key.repeat_interleave(query.shape[1] // aligned_key.shape[1], 1)
    return ((query * key).sum(-1) / query.shape[-1] ** 0.5).mean(-1)


def _tas(state: LayerState, remembered: Tensor | None) -> np.ndarray:
    assert remembered is not None
    return temporal_attention_score(state.rotated_query[:, :, 0], remembered).float().cpu().numpy()


def _tas_official(state: LayerState, remembered: Tensor | None) -> np.ndarray:
    assert remembered is not None
    return temporal_attention_score(state.query[:, :, 0], remembered).float().cpu().numpy()


def _input(state: LayerState, remembered: Tensor | None) -> np.ndarray:
    assert remembered is not None
    now, then = state.mlp_input.float(), remembered.float()
    if not now.is_cpu:
        return F.cosine_similarity(now, then, dim=-1).cpu().numpy()
    # The same in NumPy, whose operations cost a fraction of PyTorch's on so few numbers.
    a, b = now.numpy(), then.numpy()
    return np.vecdot(a, b) / np.sqrt(np.vecdot(a, a) * np.vecdot(b, b) + 1e-30)


def _random(state: LayerState, remembered: Tensor | None) -> np.ndarray:
    # SplitMix64 of the place: the same for every row, whatever stands beside it, and for every run.
    bits = (state.step << 16 | state.layer) * 0x9E3779B97F4A7C15 % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ bits >> shift) * factor % 2**64
    return np.full(len(state.mlp_input), ((bits ^ bits >> 31) >> 40) / 2**24, np.float32)


SCORES = {
    score.name: score
    for score in (
        Score(
            "input",
            "FastCar: cosine of the MLP's input with the input that produced the cached output; a Lipschitz MLP's "
            "output changes little where its input does",
            "input",
            False,
            True,
            torch.float32,
            _input,
        ),
        Score(
            "tas",
            "arXiv 2505.14709: query and aligned key, both after RoPE; replay at or above",
            "key",
            False,
            False,
            None,
            _tas,
        ),
        Score(
            "tas-official",
            "the paper's official code: query before RoPE, aligned key after RoPE; replay above",
            "key",
            True,
            False,
            None,
            _tas_official,
        ),
        Score("random", "a control: uniform in 0..1 by step and layer", None, False, True, torch.float32, _random),
    )
}

"""Scores: how well a token's MLP output of the frame before would serve now. Higher means replay.

Each is computed for one layer and all rows at once, from what the layer has at hand right before its MLP, and from
what was remembered at the aligned position one frame earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["SCORES", "LayerState", "Score", "temporal_attention_score"]


@dataclass(frozen=True)
class LayerState:
    """What a layer knows of the current position before its MLP, for B rows.

    Attributes:
        query: before rotary embedding, [B, h, d].
        rotated_query: after it, [B, h, d].
        rotated_key: after it, [B, kv heads, d].
        mlp_input: what the MLP would be given, after its norm, [B, H].
    """

    query: Tensor
    rotated_query: Tensor
    rotated_key: Tensor
    mlp_input: Tensor


@dataclass(frozen=True)
class Score:
    """A score and its manners.

    Attributes:
        name: how users call it.
        source: where it comes from.
        remembers: what must be kept of the last N positions: each position's ``"key"``, or the MLP ``"input"`` that
            produced the output now in the ring.
        strict: whether its source replays above the threshold only.
        compute: ``(state, remembered) -> float32 or the model's dtype [B]``.
    """

    name: str
    source: str
    remembers: Literal["key", "input"] | None
    strict: bool
    compute: Callable[[LayerState, Tensor | None], Tensor]


def temporal_attention_score(query: Tensor, aligned_key: Tensor) -> Tensor:
    """Mean over heads of ``<q, k> / sqrt(d)``: query [B, h, d] and key [B, kv heads, d] to [B] (paper, section 3)."""
    key = aligned_key.repeat_interleave(query.shape[1] // aligned_key.shape[1], 1)
    return ((query * key).sum(-1) / query.shape[-1] ** 0.5).mean(-1)


def _tas(state: LayerState, remembered: Tensor | None) -> Tensor:
    assert remembered is not None
    return temporal_attention_score(state.rotated_query, remembered)


def _tas_official(state: LayerState, remembered: Tensor | None) -> Tensor:
    assert remembered is not None
    return temporal_attention_score(state.query, remembered)


def _input(state: LayerState, remembered: Tensor | None) -> Tensor:
    assert remembered is not None
    return F.cosine_similarity(state.mlp_input.float(), remembered.float(), dim=-1)


def _random(state: LayerState, remembered: Tensor | None) -> Tensor:
    # A fixed hash of the MLP input: no state, the same for the same run, and blind to what it hashes.
    bits = state.mlp_input.float().contiguous().view(torch.int32)[:, :8].long().sum(1)
    return ((bits * 2654435761) % (1 << 24)).float() / (1 << 24)


SCORES = {
    score.name: score
    for score in (
        Score(
            "input",
            "FastCar: cosine of the MLP's input with the input that produced the cached output; a Lipschitz MLP's "
            "output changes little where its input does",
            "input",
            False,
            _input,
        ),
        Score(
            "tas", "arXiv 2505.14709: query and aligned key, both after RoPE; replay at or above", "key", False, _tas
        ),
        Score(
            "tas-official",
            "the paper's official code: query before RoPE, aligned key after RoPE; replay above",
            "key",
            True,
            _tas_official,
        ),
        Score("random", "a control: uniform in 0..1, knows nothing", None, False, _random),
    )
}

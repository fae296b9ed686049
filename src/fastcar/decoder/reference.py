"""The reference decoder: plain PyTorch, and the specification of every other engine.

Per layer: attention, score, decision, then the MLP for the rows that compute and the cached output for those that
replay (paper, algorithm 1). Replayed rows are gathered out beforehand; where all rows replay the MLP is not touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar.decoder.base import check_prompt, check_step
from fastcar.decoder.kv_cache import AttentionConfig, KVCache
from fastcar.decoder.llama import LlamaModel, apply_rope, rope_tables
from fastcar.geometry import Geometry
from fastcar.replay.cache import ReplayCache
from fastcar.replay.config import ReplayConfig
from fastcar.replay.score import LayerState
from fastcar.replay.trace import ReplayTrace

__all__ = ["ReferenceDecoder"]


class ReferenceDecoder:
    """Decodes with a :class:`LlamaModel`'s weights, in their dtype and on their device. See :class:`Decoder`.

    Several decoders may share one model: all state is the decoder's own.
    """

    name = "reference"

    def __init__(self, model: LlamaModel) -> None:
        self.model, self.config = model, model.config
        self.reset()

    def reset(self) -> None:
        self.geometry: Geometry | None = None
        self.kv: KVCache | None = None
        self.replay: ReplayCache | None = None
        self.steps = self.rows = 0

    @torch.no_grad()
    def prefill(
        self,
        embeds: Tensor,
        geometry: Geometry,
        *,
        mask: Tensor | None = None,
        replay: ReplayConfig | None = None,
        attention: AttentionConfig | None = None,
        pairs: bool = False,
    ) -> Tensor:
        self.reset()
        c = self.config
        check_prompt(c, embeds, geometry)
        rows, length, hidden = embeds.shape
        device = embeds.device
        self.geometry, self.rows, self.pairs = geometry, rows, pairs
        if replay is not None:
            self.replay = ReplayCache(
                replay,
                geometry,
                c.layers,
                rows,
                hidden,
                c.kv_heads,
                c.head_dim,
                pairs=pairs,
                dtype=embeds.dtype,
            )
        real = torch.ones(rows, length, dtype=torch.bool, device=device) if mask is None else mask.bool()
        self.kv = KVCache(c, attention or AttentionConfig(), geometry, real, embeds.dtype, device)
        self.lengths = real.sum(1)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        cos, sin = (t[:, None] for t in rope_tables(positions, c.head_dim, c.rope_theta))
        attention_mask = None
        if not bool(real.all()):
            causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            # A padding query sees itself: an empty row of the softmax would be NaN.
            attention_mask = causal & (real[:, None, None] | torch.eye(length, dtype=torch.bool, device=device))
        x = embeds
        for n, layer in enumerate(self.model.blocks()):
            x, keys, values = layer(x, cos, sin, attention_mask)
            self.kv.prefill(n, keys, values)
        return self.model.norm(x[:, -1])

    @torch.no_grad()
    def step(self, embeds: Tensor) -> Tensor:
        check_step(self.config, embeds, self.rows, self.geometry, self.steps)
        assert self.geometry is not None and self.kv is not None
        self.kv.turn(self.geometry.prefix + self.steps)
        cos, sin = rope_tables(self.lengths + self.steps, self.config.head_dim, self.config.rope_theta)
        cos, sin = cos[:, None, None], sin[:, None, None]
        x = embeds[:, None]
        for n, layer in enumerate(self.model.blocks()):
            query, key, value = layer.self_attn.qkv(layer.input_layernorm(x))
            rotated_query, rotated_key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
            keys, values = self.kv.append(n, rotated_key, value)
            x = x + layer.self_attn.attend(rotated_query, keys, values, self.kv.mask)
            mlp_input = layer.post_attention_layernorm(x)[:, 0]
            if self.replay is None:
                output = layer.mlp(mlp_input)
            else:
                state = LayerState(query, rotated_query, rotated_key, mlp_input, self.steps, n)
                output = self.replay.mlp(n, layer.mlp, state)
            x = x + output[:, None]
        self.steps += 1
        if self.replay is not None:
            self.replay.advance()
        return self.model.norm(x[:, 0])

    def memory(self) -> dict[str, int]:
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return {
            "weights": weights,
            "kv_cache": self.kv.memory() if self.kv else 0,
            "replay": self.replay.memory() if self.replay else 0,
        }

    def trace(self) -> ReplayTrace:
        if self.geometry is None:
            raise RuntimeError("no clip was decoded yet")
        if self.replay is not None:
            return self.replay.trace()
        return ReplayTrace.dense(self.geometry, self.config.layers, self.rows, self.pairs)

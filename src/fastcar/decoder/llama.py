"""The weights of a Llama-family decoder, and its parallel pass over a whole sequence.

Parameter names are those of Llama checkpoints (``layers.0.self_attn.q_proj.weight`` ...). The parallel pass serves
training and prefill; decoding one position at a time, with replay, is :mod:`fastcar.decoder.reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcar.decoder.config import DecoderConfig

__all__ = ["LlamaLayer", "LlamaModel", "apply_rope", "rope_tables"]


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embedding (RoFormer, in Llama's halves): int64 [...] to two float32 [..., d].

    The sines' first half is negated, as :func:`apply_rope` wants it.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[..., None].float() * inverse
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [..., d] by tables that broadcast against it."""
    return torch.addcmul(x * cos.to(x.dtype), x.roll(x.shape[-1] // 2, -1), sin.to(x.dtype))


class Attention(nn.Module):
    """The four projections of grouped-query attention; :meth:`qkv` splits heads, :meth:`attend` attends."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.config = config
        self.q_proj = nn.Linear(h, config.heads * d, bias=False)
        self.k_proj = nn.Linear(h, config.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, config.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(config.heads * d, h, bias=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] to query [B, h, S, d] and key and value [B, kv heads, S, d], before RoPE."""
        d = self.config.head_dim
        q, k, v = (p(x).unflatten(-1, (-1, d)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Attention of rotated queries over keys and values, then the output projection: [B, S, H]."""
        gqa = self.config.heads != self.config.kv_heads
        with torch.autocast(q.device.type, enabled=False):
            if q.requires_grad and q.device.type == "cpu":
                q, k, v = q.float(), k.float(), v.float()  # its bfloat16 backward is slower than float32's
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
        return self.o_proj(out.transpose(1, 2).flatten(2).to(self.o_proj.weight.dtype))


class MLP(nn.Module):
    """SwiGLU. Rows are independent: it may be given any subset of a batch."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    """One block: attention and MLP, each behind a norm and a residual connection."""

    self_attn: Attention
    mlp: nn.Module

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, causal: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A whole sequence [B, S, H]: ``(output, rotated keys, values)``."""
        q, k, v = self.self_attn.qkv(self.input_layernorm(x))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        x = x + self.self_attn.attend(q, k, v, mask, causal and mask is None)
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class LlamaModel(nn.Module):
    """A stack of blocks and a final norm, without token embeddings or output head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def blocks(self) -> Iterator[LlamaLayer]:
        """The blocks in order, typed."""
        return iter(cast("list[LlamaLayer]", self.layers))

    def forward(self, embeds: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Final hidden states [B, S, H] of embeddings [B, S, H] under causal attention.

        Args:
            positions: int64 [B, S] or [S]; 0, 1, 2 ... if not given.
            mask: bool [B, 1, S, S], True where a query may look; plain causal if not given.
        """
        if positions is None:
            positions = torch.arange(embeds.shape[1], device=embeds.device)
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        x = embeds
        for layer in self.blocks():
            x, _, _ = layer(x, cos, sin, mask)
        return self.norm(x)

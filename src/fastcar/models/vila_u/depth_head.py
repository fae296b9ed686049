"""VILA-U's RQ-transformer (arXiv 2203.01941): draws a token's D codes one after another."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcar.models.base import Choose
from fastcar.models.vila_u.config import DepthHeadConfig

__all__ = ["RQTransformer"]


class Attention(nn.Module):
    """Causal attention over depths, with room for the keys and values of those before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key, self.query, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.proj(out.transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    """Attention and a GELU MLP, each behind a norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, past = self.attn(self.ln1(x), past)
        x = x + attended
        return x + self.mlp(self.ln2(x)), past


class RQTransformer(nn.Module):
    """Depth 0 sees the decoder's hidden state; depth d the sum of the code vectors of the depths before.

    Args:
        vectors: codes int64 [..., d] to code vectors [..., d, E].
    """

    def __init__(self, config: DepthHeadConfig, vectors: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config, self.vectors = config, vectors
        self.in_mlp_1 = nn.Linear(config.code_dim, config.width)
        self.in_mlp_2 = nn.Linear(config.hidden_size, config.width)
        self.pos_emb_d = nn.Parameter(torch.empty(1, config.depth, config.width))
        blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.head_transformer = nn.ModuleDict({"blocks": blocks})
        classifier = {
            "layer_norm": nn.LayerNorm(config.width),
            "linear": nn.Linear(config.width, config.codebook_size),
        }
        self.classifier_mlp = nn.ModuleDict(classifier)

    def _blocks(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        blocks = self.head_transformer["blocks"]
        assert isinstance(blocks, nn.ModuleList)
        for n, block in enumerate(blocks):
            x, new = block(x, past[n] if n < len(past) else None)
            past[n : n + 1] = [new]
        return self.classifier_mlp["linear"](self.classifier_mlp["layer_norm"](x))

    @torch.no_grad()
    def logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Logits [B, D, V] of hidden states [B, H] when the codes int64 [B, D] are given."""
        sums = self.vectors(codes[:, :-1]).cumsum(-2)
        x = torch.cat((self.in_mlp_2(hidden)[:, None], self.in_mlp_1(sums)), 1)
        return self._blocks(x + self.pos_emb_d, [])

    @torch.no_grad()
    def sample(self, hidden: Tensor, choose: Choose) -> Tensor:
        past: list[tuple[Tensor, Tensor]] = []
        x, codes = self.in_mlp_2(hidden), hidden.new_empty(len(hidden), 0, dtype=torch.long)
        for depth in range(self.config.depth):
            if depth:
                x = self.in_mlp_1(self.vectors(codes).cumsum(-2)[:, -1])
            logits = self._blocks((x + self.pos_emb_d[:, depth])[:, None], past)[:, 0]
            codes = torch.cat((codes, choose(depth, logits)[:, None]), 1)
        return codes

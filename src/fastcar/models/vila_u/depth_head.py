"""VILA-U's RQ-transformer (arXiv 2203.01941): draws a token's D codes one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcar.decoder import native
from fastcar.models.base import Choose, DepthHead
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

    def native(self, precision: str) -> Callable[[], DepthHead]:
        """Pack for :mod:`fastcar.decoder.native`."""

        def linear(*layers: nn.Linear) -> Any:
            return native.pack(*(f.weight for f in layers), bias=[f.bias for f in layers], precision=precision)

        def norm(layer: nn.LayerNorm) -> Any:
            return native.norm(layer.weight, layer.eps, layer.bias)

        blocks = [
            native.block(
                norm(block.ln1),
                norm(block.ln2),
                linear(block.attn.query, block.attn.key, block.attn.value),
                linear(block.attn.proj),
                linear(cast("nn.Linear", block.mlp[0])),
                linear(cast("nn.Linear", block.mlp[2])),
                gated=False,
            )
            for block in cast("list[Block]", self.head_transformer["blocks"])
        ]
        return native.NativeDepthHead.pack(
            heads=self.config.heads,
            depths=self.pos_emb_d[0],
            tables=self.tables(),
            hidden=self.config.hidden_size,
            hidden_in=linear(self.in_mlp_2),
            code_in=linear(self.in_mlp_1),
            blocks=blocks,
            norm=norm(cast("nn.LayerNorm", self.classifier_mlp["layer_norm"])),
            classifiers=[linear(cast("nn.Linear", self.classifier_mlp["linear"]))],
        )

    def tables(self) -> list[Tensor]:
        """Code vectors [V, E] of every depth but the last."""
        every = torch.arange(self.config.codebook_size, device=self.pos_emb_d.device)
        books = self.vectors(every[:, None].expand(-1, max(1, self.config.depth - 1)))
        return list(books.unbind(1))

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

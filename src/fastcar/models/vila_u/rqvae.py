"""VILA-U's codes to frames: codebook rows summed over depth, then VQGAN's decoder (arXiv 2012.09841)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcar.models.vila_u.config import RQVAEConfig

__all__ = ["RQVAE", "to_pixels"]


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResBlock(nn.Module):
    """Two convolutions behind norm and swish, and a shortcut."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = _norm(outer), nn.Conv2d(outer, outer, 3, padding=1)
        if inner != outer:
            self.nin_shortcut = nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class AttnBlock(nn.Module):
    """Attention of one head over all places."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).flatten(2).mT[:, None] for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v)[:, 0].mT.reshape(x.shape)
        return x + self.proj_out(h)


class Upsample(nn.Module):
    """Twice the size, by nearest neighbour, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Decoder(nn.Module):
    """VQGAN's decoder. Parameter names are the checkpoint's."""

    def __init__(self, config: RQVAEConfig) -> None:
        super().__init__()
        channels = config.width * config.multipliers[-1]
        resolution = config.resolution // 2 ** (len(config.multipliers) - 1)
        self.conv_in = nn.Conv2d(config.z_channels, channels, 3, padding=1)
        self.mid = nn.ModuleDict(
            {
                "block_1": ResBlock(channels, channels),
                "attn_1": AttnBlock(channels),
                "block_2": ResBlock(channels, channels),
            }
        )
        levels: list[nn.ModuleDict] = []
        for level in reversed(range(len(config.multipliers))):
            outer = config.width * config.multipliers[level]
            blocks, attention = nn.ModuleList(), nn.ModuleList()
            for _ in range(config.res_blocks + 1):
                blocks.append(ResBlock(channels, outer))
                channels = outer
                if resolution in config.attention_at:
                    attention.append(AttnBlock(channels))
            parts = nn.ModuleDict({"block": blocks, "attn": attention})
            if level:
                parts["upsample"] = Upsample(channels)
                resolution *= 2
            levels.insert(0, parts)
        self.up = nn.ModuleList(levels)
        self.norm_out = _norm(channels)
        self.conv_out = nn.Conv2d(channels, config.out_channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.conv_in(z)
        for part in self.mid.values():
            h = part(h)
        for level in reversed(self.up):
            assert isinstance(level, nn.ModuleDict)
            blocks, attention = list(level["block"]), list(level["attn"])  # type: ignore[call-overload]
            for n, block in enumerate(blocks):
                h = block(h)
                if attention:
                    h = attention[n](h)
            if "upsample" in level:
                h = level["upsample"](h)
        return self.conv_out(F.silu(self.norm_out(h)))


def to_pixels(frames: Tensor) -> Tensor:
    """Raw frames [..., 3, h, w] to uint8 [..., h, w, 3], as the official conversion: clamped, then truncated."""
    return ((frames.float() + 1) * 127.5).clamp(0, 255).to(torch.uint8).movedim(-3, -1)


class RQVAE(nn.Module):
    """Codebooks and decoder, and an encoder when it is first asked for. See :class:`fastcar.models.base.FrameCodec`.

    Args:
        encoder: gives the encoder, from frames uint8 [n, H, W, 3] to latents [n, N, E]; None if there is none.
    """

    def __init__(self, config: RQVAEConfig, encoder: Callable[[], Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self.config, self.load_encoder = config, encoder
        self.encoder: list[Callable[[Tensor], Tensor]] = []  # a list, so that it is no part of the state
        books = 1 if config.shared_codebook else config.grid[2]
        # one row more than codes: padding
        self.codebooks = nn.ModuleList(nn.Embedding(config.codebook_size + 1, config.code_dim) for _ in range(books))
        self.post_quant_conv = nn.Conv2d(config.code_dim, config.z_channels, 1)
        self.decoder = Decoder(config)

    def vectors(self, codes: Tensor) -> Tensor:
        """Codes int64 [..., d], of the first d depths, to codebook rows [..., d, E]."""
        books = list(self.codebooks) * (codes.shape[-1] if self.config.shared_codebook else 1)
        return torch.stack([book(code) for book, code in zip(books, codes.unbind(-1), strict=False)], -2)

    def latents(self, codes: Tensor) -> Tensor:
        """Codes int64 [n, N, D] to what the decoder is given before ``post_quant_conv``, [n, E, g, g]."""
        height, width, _ = self.config.grid
        z = self.vectors(codes).sum(-2).unflatten(1, (height, width)).movedim(-1, 1)
        if self.config.latent_size is None:
            return z
        return F.interpolate(z.float(), size=self.config.latent_size, mode="bilinear").to(z.dtype)

    def raw_frames(self, codes: Tensor) -> Tensor:
        """Codes int64 [n, N, D] to frames [n, 3, h, w], nearly in -1..1."""
        return self.decoder(self.post_quant_conv(self.latents(codes)))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        frames = [self.raw_frames(few) for few in codes.flatten(0, -3).split(8)]  # bounds what is held at once
        return to_pixels(torch.cat(frames)).unflatten(0, codes.shape[:-2])

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        if not self.encoder:
            if self.load_encoder is None:
                raise ValueError("this codec has no encoder, so frames cannot be turned into codes")
            self.encoder.append(self.load_encoder())
        rest, codes = self.encoder[0](frames.flatten(0, -4)), []
        for depth in range(self.config.grid[2]):
            of_depth = cast(nn.Embedding, self.codebooks[0 if self.config.shared_codebook else depth])
            book = of_depth.weight[: self.config.codebook_size]
            codes.append(torch.cdist(rest.float(), book.float()).argmin(-1))
            rest = rest - book[codes[-1]]
        return torch.stack(codes, -1).unflatten(0, frames.shape[:-3])

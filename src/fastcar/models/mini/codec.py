"""The mini model's frame codec: a residual-quantised autoencoder, 64x64 pixels to an 8x8 grid of D codes.

The encoder sees 16 pixels around a token and no more. With a field over the whole picture the codes of a still
background would flicker whenever an object moves elsewhere, and neighbouring frames would look less alike to the
decoder than they are. The decoder sees further, to draw clean edges between tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CodecConfig", "MiniCodec"]


@dataclass(frozen=True)
class CodecConfig:
    """Sizes of the codec.

    Attributes:
        size: side of a frame in pixels; a multiple of 8. Tokens per frame grow with its square.
        depth: codes per token (D). Each refines the sum of those before it and costs one pass of the depth head.
        codebook_size: entries of the codebook that all depths share.
        latent_dim: width of a codebook entry.
        width: channels of the inner layers; quality against weights and time.
    """

    size: int = 64
    depth: int = 2
    codebook_size: int = 512
    latent_dim: int = 32
    width: int = 192

    def __post_init__(self) -> None:
        if self.size < 8 or self.size % 8:
            raise ValueError(f"size must be a positive multiple of 8, got {self.size!r}")
        for name in ("depth", "codebook_size", "latent_dim", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")

    @property
    def grid(self) -> int:
        """Tokens along one side of a frame."""
        return self.size // 8

    @property
    def tokens_per_frame(self) -> int:
        return self.grid**2


class _Residual(nn.Module):
    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)
        self.outer = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(F.gelu(x))))


class MiniCodec(nn.Module):
    """Frames to codes and back.

    Pixels are float in -1..1 inside, uint8 [..., height, width, 3] outside; codes are int64 [..., N, D].
    """

    codebook: Tensor

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        w, c = config.width, config.latent_dim
        self.encoder = nn.Sequential(
            nn.Conv2d(3, w // 2, 4, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(w // 2, w, 4, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(w, w, 2, stride=2),
            _Residual(w, 1),
            _Residual(w, 1),
            nn.GELU(),
            nn.Conv2d(w, c, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(c, w, 1),
            _Residual(w, 3),
            _Residual(w, 3),
            nn.Conv2d(w, 4 * 96, 1),
            nn.PixelShuffle(2),
            _Residual(96, 3),
            nn.Conv2d(96, 4 * 48, 1),
            nn.PixelShuffle(2),
            _Residual(48, 3),
            nn.GELU(),
            nn.Conv2d(48, 4 * 3, 3, padding=1),
            nn.PixelShuffle(2),
        )
        self.register_buffer("codebook", torch.zeros(config.codebook_size, c))

    def latents(self, pixels: Tensor) -> Tensor:
        """Pixels float [B, 3, H, W] in -1..1 to latents [B, N, C], before quantisation."""
        return self.encoder(pixels).flatten(2).transpose(1, 2)

    def nearest(self, latents: Tensor) -> Tensor:
        """Index of the nearest codebook entry: [..., C] to int64 [...]."""
        book = self.codebook.to(latents.dtype)
        return (book.square().sum(-1) - 2 * latents @ book.T).argmin(-1)

    def quantise(self, latents: Tensor) -> Tensor:
        """Residual quantisation (RQ-VAE): [..., C] to codes int64 [..., D]."""
        codes, rest = [], latents
        for _ in range(self.config.depth):
            codes.append(self.nearest(rest))
            rest = rest - self.codebook[codes[-1]]
        return torch.stack(codes, -1)

    def embed(self, codes: Tensor) -> Tensor:
        """Codes int64 [..., D] to the sum of their entries [..., C]."""
        return self.codebook[codes].sum(-2)

    def pixels(self, latents: Tensor) -> Tensor:
        """Latents [B, N, C] to pixels float [B, 3, H, W] in about -1..1."""
        g = self.config.grid
        return self.decoder(latents.transpose(1, 2).unflatten(2, (g, g)))

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """Frames uint8 [..., H, W, 3] to codes int64 [..., N, D]."""
        x = frames.flatten(0, -4).permute(0, 3, 1, 2).to(self.codebook.dtype) / 127.5 - 1
        codes = self.quantise(self.latents(x))
        return codes.unflatten(0, frames.shape[:-3])

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Codes int64 [..., N, D] to frames uint8 [..., H, W, 3]."""
        x = self.pixels(self.embed(codes.flatten(0, -3)))
        frames = ((x.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        return frames.unflatten(0, codes.shape[:-2])

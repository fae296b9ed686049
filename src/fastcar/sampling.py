"""From logits to codes: guidance, temperature, top-k, top-p, and noise that depends on seed, row and position alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = ["GivenNoise", "Noise", "SamplingConfig", "SeededNoise", "draw", "guide", "probabilities"]


@dataclass(frozen=True)
class SamplingConfig:
    """How codes are drawn.

    Attributes:
        temperature: divides the logits; lower is more certain, 0 takes the most likely code.
        top_k: keep the k most likely codes (ties at the border stay); 0 keeps all.
        top_p: keep the most likely codes until their mass reaches p; 1 keeps all.
        guidance: classifier-free guidance scale; above 1 every clip takes two rows, and follows its prompt more.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float = 3.0

    def __post_init__(self) -> None:
        # Beyond these bounds float32 logits overflow and every draw is the same.
        if not (_is_number(self.temperature) and (self.temperature == 0 or 1e-4 <= self.temperature <= 1e4)):
            raise ValueError(f"temperature must be 0 or a number in 0.0001..10000, got {self.temperature!r}")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number from 0 on (0 keeps all), got {self.top_k!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must lie in 0..1, above 0, got {self.top_p!r}")
        if not (_is_number(self.guidance) and 0 <= self.guidance <= 1e4):
            raise ValueError(f"guidance must be a number in 0..10000, got {self.guidance!r}")

    @property
    def guided(self) -> bool:
        """Whether a blank row runs beside every conditional one."""
        return self.guidance != 1.0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def guide(logits: Tensor, scale: float) -> Tensor:
    """Guided logits [b, V] of rows [conditional..., blank...] [2b, V]: ``blank + scale * (conditional - blank)``."""
    conditional, blank = logits.chunk(2)
    return blank + scale * (conditional - blank)


def probabilities(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Float32 probabilities [B, V] after temperature, top-k and top-p, in this order.

    Top-p drops a code when the mass of those before it has reached p, so the first always stays.
    """
    logits = logits.float()
    if config.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / config.temperature
    if 0 < config.top_k < logits.shape[-1]:
        least = logits.topk(config.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(-1)
    if config.top_p < 1:
        ordered, index = probs.sort(-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered >= config.top_p
        dropped[..., 0] = False
        probs = probs.masked_fill(dropped.scatter(-1, index, dropped), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, noise: Tensor) -> Tensor:
    """Codes int64 [B], drawn from probabilities by Exp(1) noise, both [B, V]: ``argmax(probs / noise)``."""
    return (probs / noise).argmax(-1)


class Noise(Protocol):
    """Exp(1) noise by position."""

    def at(self, position: int) -> Tensor:
        """Float32 [b, D, V] of one position, for b clips."""
        ...


class GivenNoise:
    """Noise float32 [positions, D, b, V] drawn elsewhere: another program's clip, drawn again.

    Raises:
        ValueError: it has another form, or a value that is not above zero, or no such position.
    """

    def __init__(self, values: Tensor) -> None:
        if values.dim() != 4 or not values.is_floating_point():
            raise ValueError(
                f"noise must be floats [positions, depth, clips, codes], got {values.dtype} {list(values.shape)}"
            )
        if not bool((values > 0).all()):
            raise ValueError("noise must be above zero everywhere, as Exp(1) draws are")
        self.values = values

    def at(self, position: int) -> Tensor:
        if position >= len(self.values):
            raise ValueError(f"noise for {len(self.values)} positions was given, but the clip has more")
        return self.values[position].transpose(0, 1)


class SeededNoise:
    """Noise from a counter-based generator (Philox): a draw depends on seed, position, depth and code alone.

    So a clip comes out the same whatever is generated beside it, in whatever order positions are visited.
    """

    def __init__(self, seeds: list[int], depth: int, codebook_size: int, device: torch.device | str = "cpu") -> None:
        if any(not 0 <= seed < 2**63 for seed in seeds):
            raise ValueError(f"seeds must be whole numbers in 0..2**63-1, got {seeds!r}")
        self.seeds, self.shape, self.device = seeds, (depth, codebook_size), device

    def at(self, position: int) -> Tensor:
        rows = [
            np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, position])).standard_exponential(
                self.shape, dtype=np.float32
            )
            for seed in self.seeds
        ]
        # A zero, which float32 noise may hold, would let an impossible code win.
        return torch.from_numpy(np.maximum(rows, np.finfo(np.float32).tiny)).to(self.device)

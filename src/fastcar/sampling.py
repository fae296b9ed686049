"""From logits to codes: guidance, temperature, top-k, top-p, and noise that depends on seed, row and position alone.

In NumPy: a token's logits are few numbers, and on so few its operations cost a fraction of PyTorch's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
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


def guide(logits: np.ndarray, scale: float) -> np.ndarray:
    """Guided logits [b, V] of rows [conditional..., blank...] [2b, V]: ``blank + scale * (conditional - blank)``."""
    conditional, blank = np.split(logits, 2)
    return blank + np.float32(scale) * (conditional - blank)


def probabilities(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """Float32 probabilities [B, V] after temperature, top-k and top-p, in this order.

    Top-p drops a code when the mass of those before it has reached p, so the first always stays.
    """
    logits = logits.astype(np.float32, copy=False)
    if config.temperature == 0:
        return (np.arange(logits.shape[-1]) == logits.argmax(-1)[..., None]).astype(np.float32)
    logits = logits / np.float32(config.temperature)
    if 0 < config.top_k < logits.shape[-1]:
        least = np.partition(logits, -config.top_k, -1)[..., -config.top_k, None]
        logits = np.where(logits < least, np.float32(-np.inf), logits)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    if config.top_p < 1:
        order = np.argsort(-probs, -1, kind="stable")
        ordered = np.take_along_axis(probs, order, -1)
        dropped = ordered.cumsum(-1) - ordered >= config.top_p
        dropped[..., 0] = False
        np.put_along_axis(probs, order, np.where(dropped, np.float32(0), ordered), -1)
        probs /= probs.sum(-1, keepdims=True)
    return probs


def draw(probs: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Codes int64 [B], drawn from probabilities by Exp(1) noise, both [B, V]: ``argmax(probs / noise)``."""
    return (probs / noise).argmax(-1)


class Noise(Protocol):
    """Exp(1) noise by position."""

    def at(self, position: int) -> np.ndarray:
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
        self.values = values.float().cpu().numpy()

    def at(self, position: int) -> np.ndarray:
        if position >= len(self.values):
            raise ValueError(f"noise for {len(self.values)} positions was given, but the clip has more")
        return self.values[position].swapaxes(0, 1)


class SeededNoise:
    """Noise from a counter-based generator (Philox): a draw depends on seed, position, depth and code alone.

    So a clip comes out the same whatever is generated beside it, in whatever order positions are visited.
    """

    def __init__(self, seeds: list[int], depth: int, codebook_size: int) -> None:
        if any(not 0 <= seed < 2**63 for seed in seeds):
            raise ValueError(f"seeds must be whole numbers in 0..2**63-1, got {seeds!r}")
        self.shape = depth, codebook_size
        self.generators = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]
        self.states = [generator.bit_generator.state for generator in self.generators]

    def at(self, position: int) -> np.ndarray:
        rows = []
        for generator, state in zip(self.generators, self.states, strict=True):
            state["state"]["counter"][3] = position
            generator.bit_generator.state = state
            rows.append(generator.standard_exponential(self.shape, dtype=np.float32))
        # A zero, which float32 noise may hold, would let an impossible code win.
        return np.maximum(rows, np.finfo(np.float32).tiny)

"""Keys and values of the positions so far: all of them, or attention sinks and a window (StreamingLLM).

StreamingLLM is arXiv 2309.17453; the paper of cache attentive replay combines the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.llama import apply_rope, rope_tables
from fastcar.geometry import Geometry

__all__ = ["AttentionConfig", "KVCache"]


@dataclass(frozen=True)
class AttentionConfig:
    """Which positions a decoded token attends to: all before it, or the first few (sinks) and the last few (window).

    Prompts are prefilled with full attention; the window holds while decoding.

    Attributes:
        window: latest positions attended to, the token's own among them: a number, or ``"2 frames"``. ``None`` attends
            to all. Smaller is faster and, with ``evict``, takes less memory; quality drifts.
        sinks: first positions that are always attended to: a number, counted for each row from its first real token,
            or ``"prompt"`` for the whole prompt. Without any, quality collapses.
        evict: forget what lies outside, in a ring whose memory does not grow with the clip. ``False`` only masks it, as
            the paper's official code does: the same clip, no memory saved.
        positions: rotary positions: ``"absolute"`` as without a window, or ``"window"``, counted within what is
            attended to, so that clips longer than the model was trained on stay within the distances it knows.
    """

    window: int | str | None = None
    sinks: int | Literal["prompt"] = 4
    evict: bool = True
    positions: Literal["absolute", "window"] = "absolute"

    def __post_init__(self) -> None:
        if self.window is not None and not _whole(self.window, 1) and not self._frames():
            raise ValueError(f"window must be a number from 1 on, or like '2 frames', got {self.window!r}")
        if self.sinks != "prompt" and not _whole(self.sinks, 0):
            raise ValueError(f"sinks must be a number from 0 on, or 'prompt', got {self.sinks!r}")
        if not isinstance(self.evict, bool):
            raise ValueError(f"evict must be True or False, got {self.evict!r}")
        if self.positions not in ("absolute", "window"):
            raise ValueError(f"positions must be 'absolute' or 'window', got {self.positions!r}")
        if self.positions == "window" and not self.evict:
            raise ValueError("positions='window' re-rotates what a ring holds, so it needs evict=True")

    def _frames(self) -> int | None:
        found = re.fullmatch(r"([1-9]\d*) frames?", self.window) if isinstance(self.window, str) else None
        return int(found[1]) if found else None

    def sizes(self, geometry: Geometry) -> tuple[int, int]:
        """``(sinks, window)`` in positions of a clip; ``(0, positions)`` where nothing lies outside."""
        frames = self._frames()
        window = frames * geometry.tokens_per_frame if frames else self.window
        sinks = geometry.prefix if self.sinks == "prompt" else self.sinks
        if not isinstance(window, int) or sinks + window >= geometry.positions:
            return 0, geometry.positions
        return sinks, window

    def slots(self, geometry: Geometry) -> int:
        """Positions whose keys and values are kept."""
        return sum(self.sizes(geometry)) if self.evict else geometry.positions


class KVCache:
    """Keys and values [L, B, kv heads, slots, d], allocated once and written in place.

    With eviction the first slots hold the sinks and the others are a ring; else a position's slot is its number. A
    prompt is stored by :meth:`prefill`; then each step begins with :meth:`turn`, and in each layer :meth:`append`.

    Args:
        real: bool [B, P], False where the prompt is padded (on the left).

    Attributes:
        mask: bool [B, 1, 1, slots in use], which slots the current token may attend to; None for all.
    """

    def __init__(
        self,
        config: DecoderConfig,
        attention: AttentionConfig,
        geometry: Geometry,
        real: Tensor,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.attention, self.geometry = config, attention, geometry
        self.sinks, self.window = attention.sizes(geometry)
        self.ring = attention.evict and self.window < geometry.positions
        rows, length = real.shape
        shape = (config.layers, rows, config.kv_heads, attention.slots(geometry), config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        pads = length - real.sum(1)
        self.first = torch.zeros_like(pads) if attention.sinks == "prompt" else pads  # the first sink of each row
        self.alike_from = int(self.first.max()) + self.sinks  # the position from which no row takes it for a sink
        self.rows = torch.arange(rows, device=device)
        self.padded = bool(pads.any())
        self.masked = not self.ring and self.window < geometry.positions
        self.mask: Tensor | None = None

        position = torch.arange(length, device=device)
        is_sink = position < self.first[:, None] + self.sinks
        kept = real & (is_sink | (position >= length - self.window)) if self.ring else real
        self.source = kept.nonzero(as_tuple=True)  # rows and positions of the prompt that are kept
        self.target = self._slots(position.expand(rows, -1))[self.source]  # and where
        self.usable = torch.zeros(rows, shape[3], dtype=torch.bool, device=device)
        self.usable[self.source[0], self.target] = True
        self.rerotated = attention.positions == "window" and self.ring
        if self.rerotated:
            self.sink_keys = torch.zeros_like(self.keys[..., : self.sinks, :])

    def _slots(self, position: Tensor) -> Tensor:
        """Where positions [B, S] are stored."""
        if not self.ring:
            return position
        offset = position - self.first[:, None]
        return torch.where(offset < self.sinks, offset, self.sinks + (position - self.sinks) % self.window)

    def prefill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a prompt's keys and values [B, kv heads, P, d]."""
        row, position = self.source
        self.keys[layer, row, :, self.target] = keys[row, :, position]
        self.values[layer, row, :, self.target] = values[row, :, position]
        if self.rerotated:
            self.sink_keys[layer] = self.keys[layer, :, :, : self.sinks]

    def turn(self, position: int) -> None:
        """Begin the step that feeds ``position``, counted from the first of the (padded) prompt."""
        self.used = min(position + 1, self.keys.shape[3])
        self.late_sink = self.ring and position < self.alike_from  # a short prompt's first tokens are sinks too
        if self.late_sink:
            self.slot: int | Tensor = self._slots(torch.full_like(self.rows, position)[:, None])[:, 0]
        else:
            self.slot = self.sinks + (position - self.sinks) % self.window if self.ring else position
        if self.padded or self.masked:
            self.usable[self.rows, self.slot] = True
            usable = self.usable[:, : self.used]
            if self.masked:
                place = torch.arange(self.used, device=usable.device)
                usable = usable & ((place < self.first[:, None] + self.sinks) | (place > position - self.window))
            self.mask = None if bool(usable.all()) else usable[:, None, None]
        if self.rerotated:
            # Attention knows distances only: instead of moving the window back by what was evicted, move the sinks on.
            evicted = (position + 1 - self.window - self.first - self.sinks).clamp(min=0)
            cos, sin = rope_tables(evicted, self.config.head_dim, self.config.rope_theta)
            self.shift = cos[:, None, None], sin[:, None, None]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the current position's [B, kv heads, 1, d]; all that may be attended to, [B, kv heads, slots, d]."""
        where = (layer, self.rows, slice(None), self.slot) if self.late_sink else (layer, ..., self.slot, slice(None))
        self.keys[where], self.values[where] = keys[:, :, 0], values[:, :, 0]
        if self.rerotated:
            sinks = self.sink_keys[layer]
            if isinstance(self.slot, Tensor):
                new = self.slot < self.sinks
                sinks[self.rows[new], :, self.slot[new]] = keys[new, :, 0]
            self.keys[layer, :, :, : self.sinks] = apply_rope(sinks, *self.shift)
        return self.keys[layer, :, :, : self.used], self.values[layer, :, :, : self.used]

    def memory(self) -> int:
        """Bytes of keys and values."""
        more = self.sink_keys.numel() if self.rerotated else 0
        return (2 * self.keys.numel() + more) * self.keys.element_size()


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least

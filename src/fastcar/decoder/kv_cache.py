"""Keys and values of the positions so far, allocated once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar.decoder.config import DecoderConfig

__all__ = ["KVCache"]


class KVCache:
    """Keys and values [L, B, kv heads, positions, d], written in place by position."""

    def __init__(
        self, config: DecoderConfig, rows: int, positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape = (config.layers, rows, config.kv_heads, positions, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [B, kv heads, S, d] at ``position ... position + S - 1``."""
        end = position + keys.shape[2]
        self.keys[layer, :, :, position:end] = keys
        self.values[layer, :, :, position:end] = values

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``length`` positions, [B, kv heads, length, d] each."""
        return self.keys[layer, :, :, :length], self.values[layer, :, :, :length]

    def memory(self) -> int:
        """Bytes."""
        return 2 * self.keys.numel() * self.keys.element_size()

"""The shape of a Llama-family decoder."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecoderConfig"]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of a Llama-family decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU).

    Attributes:
        hidden_size: width of the residual stream (H).
        layers: number of blocks (L).
        heads: query heads (h).
        kv_heads: key/value heads; ``heads`` must be a multiple of it. Fewer make the KV cache smaller.
        head_dim: width of a head (d), even.
        intermediate_size: inner width of the SwiGLU MLP. What replay saves is proportional to it.
        rms_norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {getattr(self, name)!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            if not isinstance(getattr(self, name), (int, float)) or not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number from 0 on, got {getattr(self, name)!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads!r}) must be a multiple of kv_heads ({self.kv_heads!r})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim!r}")

    @property
    def attention_weights(self) -> int:
        """Weights of one block's attention projections."""
        return self.hidden_size * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Weights of one block's MLP: what one replayed row-and-layer need not multiply."""
        return 3 * self.hidden_size * self.intermediate_size

"""Shapes that are timed, and the bytes that a step of them must read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastcar.decoder.config import DecoderConfig

__all__ = ["SHAPES", "Shape"]

_WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 2 / 64}  # bytes a weight; int8 has a scale for each 64


@dataclass(frozen=True)
class Shape:
    """A decoder and how much it attends to.

    Attributes:
        context: positions before the step that is timed.
        batch: rows; two are one guidance pair.
    """

    name: str
    config: DecoderConfig
    context: int
    batch: int = 2

    def with_layers(self, layers: int) -> Shape:
        """The same with another number of layers."""
        return replace(self, config=replace(self.config, layers=layers))

    def weight_bytes(self, precision: str, skipped: float = 0.0) -> float:
        """Bytes of weights that a step reads if that share of the layers reads no MLP."""
        c = self.config
        return _WIDTHS[precision] * c.layers * (c.attention_weights + (1 - skipped) * c.mlp_weights)

    def cache_bytes(self, precision: str, attended: int | None = None) -> float:
        """Bytes of keys and values that a step reads: float32 beside such weights, else bfloat16."""
        c = self.config
        width = 4 if precision == "float32" else 2
        return 2.0 * c.layers * self.batch * c.kv_heads * c.head_dim * width * (attended or self.context)

    def step_bytes(self, precision: str, skipped: float = 0.0, attended: int | None = None) -> float:
        """All bytes that a step must read."""
        return self.weight_bytes(precision, skipped) + self.cache_bytes(precision, attended)


SHAPES = {
    shape.name: shape
    for shape in (
        # VILA-U-7B's layers, four of its 32
        Shape("W7", DecoderConfig(4096, 4, 32, 32, 128, 11008), context=1024),
        # half a billion weights
        Shape("W05", DecoderConfig(1024, 16, 16, 16, 64, 2816), context=512),
        # a small model, of about mini's size
        Shape("WS", DecoderConfig(256, 8, 8, 8, 32, 688), context=512),
    )
}

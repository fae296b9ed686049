"""What a user says about replay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fastcar.replay.score import SCORES

__all__ = ["ReplayConfig"]


@dataclass(frozen=True)
class ReplayConfig:
    """When MLPs are replayed. Exactly one of ``threshold`` and ``target_ratio`` is given.

    Attributes:
        threshold: replay where the score reaches it; one number, or one per layer with ``None`` for a layer that is
            never replayed. Lower means faster and less faithful; ``-inf`` replays everything from the second frame
            on, ``inf`` nothing.
        target_ratio: share of MLPs, counted over all layers from the second frame on, to replay; one number, or one
            per layer. Thresholds are then steered during generation, per row, to meet it. Higher is faster and less
            faithful. Costs a ring of recent scores.
        score: ``"input"``, ``"tas"``, ``"tas-official"`` or ``"random"``; see :mod:`fastcar.replay.score`. ``"input"``
            costs a second ring of N hidden vectors a layer and row.
        strict: replay only above the threshold, not at it. ``None``: as the score's source has it.
        max_age: frames in a row that one output may be replayed; ``None`` means without limit. Lower keeps motion and
            caps the ratio at about ``max_age / (max_age + 1)``; a target close to the cap is not quite met.
        exclude_layers: layers that are never replayed.
        tie_guidance: both rows of a guidance pair replay only together. Weights are read once for a pair, so a row
            that replays alone saves arithmetic but no memory traffic: tied is faster at the same ratio.
        tokens_per_frame: positions of a frame, for models that do not know it themselves; for others it must agree.
    """

    threshold: float | Sequence[float | None] | None = None
    target_ratio: float | Sequence[float] | None = None
    score: str = "input"
    strict: bool | None = None
    max_age: int | None = None
    exclude_layers: Sequence[int] = ()
    tie_guidance: bool = False
    tokens_per_frame: int | None = None

    def __post_init__(self) -> None:
        for name in ("threshold", "target_ratio", "exclude_layers"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        if (self.threshold is None) == (self.target_ratio is None):
            raise ValueError(
                "give exactly one of threshold and target_ratio, got "
                f"threshold={self.threshold!r} and target_ratio={self.target_ratio!r}"
            )
        for value in _numbers("threshold", self.threshold):
            if math.isnan(value):
                raise ValueError(f"threshold must be a number, got {self.threshold!r}")
        if isinstance(self.target_ratio, tuple) and None in self.target_ratio:
            raise ValueError(f"target_ratio must hold numbers, 0 for a layer that computes, got {self.target_ratio!r}")
        for value in _numbers("target_ratio", self.target_ratio):
            if not 0 <= value <= 1:
                raise ValueError(f"target_ratio must lie in 0..1, got {self.target_ratio!r}")
        if not isinstance(self.score, str) or self.score not in SCORES:
            raise ValueError(f"unknown score {self.score!r}; expected one of {', '.join(SCORES)}")
        if self.strict is not None and self.threshold is None:
            raise ValueError(f"strict={self.strict!r} goes with threshold only; a target ratio is steered")
        if self.max_age is not None and (not isinstance(self.max_age, int) or self.max_age < 1):
            raise ValueError(f"max_age must be a whole number of frames, at least 1, or None, got {self.max_age!r}")
        if not isinstance(self.exclude_layers, tuple) or any(
            not isinstance(layer, int) or layer < 0 for layer in self.exclude_layers
        ):
            raise ValueError(f"exclude_layers must list layer numbers from 0 on, got {self.exclude_layers!r}")
        if self.tokens_per_frame is not None and self.tokens_per_frame < 1:
            raise ValueError(f"tokens_per_frame must be at least 1, got {self.tokens_per_frame!r}")

    def check(self, layers: int, frames: int | None = None, tokens_per_frame: int | None = None) -> None:
        """Check against a model, and a clip of so many frames if it is known.

        Raises:
            ValueError: a per-layer list of another length, an excluded layer that does not exist, another number of
                tokens per frame than the model's, or a target ratio that the layers left cannot reach.
        """
        if None not in (self.tokens_per_frame, tokens_per_frame) and self.tokens_per_frame != tokens_per_frame:
            raise ValueError(f"tokens_per_frame={self.tokens_per_frame!r}, but the model has {tokens_per_frame}")
        for name in ("threshold", "target_ratio"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != layers:
                raise ValueError(f"{name} lists {len(value)} values, but the model has {layers} layers")
        if any(layer >= layers for layer in self.exclude_layers):
            raise ValueError(
                f"exclude_layers={self.exclude_layers!r} names a layer the model has not (0..{layers - 1})"
            )
        if self.target_ratio is None:
            return
        cap = 1.0 if self.max_age is None else self.max_age / (self.max_age + 1)
        if self.max_age is not None and frames is not None:
            later = frames - 1
            cap = 1 - later // (self.max_age + 1) / later if later else 1.0
        left = [0.0 if layer in self.exclude_layers else cap for layer in range(layers)]
        if isinstance(self.target_ratio, tuple):
            wanted, reach = self.target_ratio, tuple(left)
        else:
            wanted, reach = (self.target_ratio,), (sum(left) / layers,)
        for ratio, most in zip(wanted, reach, strict=True):
            if ratio > most + 0.03:
                raise ValueError(
                    f"target_ratio {ratio!r} cannot be reached with exclude_layers={self.exclude_layers!r} "
                    f"and max_age={self.max_age!r}: at most {most:.2f}; lower it or lift the limits"
                )

    def thresholds(self, layers: int) -> list[float]:
        """The threshold of every layer; ``inf`` where a layer is not replayed (unless the score itself is infinite)."""
        given = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,) * layers
        return [
            math.inf if value is None or layer in self.exclude_layers else float(value)
            for layer, value in enumerate(given)
        ]

    def layer_ratios(self, layers: int) -> list[float]:
        """The share of each layer's MLPs to replay, so that over all layers ``target_ratio`` is met."""
        if isinstance(self.target_ratio, tuple):
            return [0.0 if n in self.exclude_layers else float(r) for n, r in enumerate(self.target_ratio)]
        assert isinstance(self.target_ratio, (int, float))
        left = layers - len(set(self.exclude_layers))
        share = min(1.0, self.target_ratio * layers / left) if left else 0.0
        return [0.0 if layer in self.exclude_layers else share for layer in range(layers)]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ReplayConfig:
        """Undo :meth:`to_dict`.

        Raises:
            ValueError: an unknown field.
        """
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown fields of ReplayConfig: {', '.join(sorted(unknown))}")
        return cls(**values)


def _numbers(name: str, value: float | Sequence[float | None] | None) -> list[float]:
    values = value if isinstance(value, tuple) else (value,)
    for number in values:
        if number is not None and (isinstance(number, (str, bool)) or not isinstance(number, (int, float))):
            raise ValueError(f"{name} must be a number or a list of numbers, got {value!r}")
    return [float(number) for number in values if number is not None]

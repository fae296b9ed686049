"""The settings of training. No heavy imports: the command line shows them in its help."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecoderTraining", "TokenizerTraining"]


@dataclass(frozen=True)
class TokenizerTraining:
    """How to train the codec.

    Attributes:
        steps: optimiser steps in all; the learning rate follows a cosine over them.
        batch: frames a step.
        learning_rate: peak of AdamW's learning rate.
        pool: clips held in memory.
        refresh: steps after which a new pool is drawn.
        unquantised: steps before the codebook starts.
        decay: of the codebook's running averages.
        focus: above 0, places reconstructed worse than the mean weigh more, by their relative error to this power.
        freeze_codes: train the decoder alone, for codes that others were already trained on.
        seed: of weights, data order and restarts.
    """

    steps: int = 4000
    batch: int = 64
    learning_rate: float = 1.5e-3
    pool: int = 2000
    refresh: int = 1000
    unquantised: int = 250
    decay: float = 0.98
    focus: float = 0.0
    freeze_codes: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, at_least_one=("steps", "batch", "pool", "refresh"), positive=("learning_rate",))
        _check(self, not_negative=("unquantised", "focus", "seed"), shares=("decay",))
        if self.unquantised >= self.steps:
            raise ValueError(
                f"the codebook starts after unquantised={self.unquantised!r} steps, so steps={self.steps!r} is too "
                "few; raise steps, or lower unquantised (0 starts at once)"
            )


@dataclass(frozen=True)
class DecoderTraining:
    """How to train the decoder.

    Attributes:
        steps: optimiser steps in all.
        clips: whole clips a step.
        first_frames: first frames a step, beside those of the clips.
        muon_rate, adam_rate: peak learning rates of matrices and of all else.
        weight_decay: of the matrices of the blocks, in proportion to the rate.
        warmup: steps over which the rates rise to their peak.
        decay_from: share of the steps after which the rates fall linearly to 2 %.
        drop_caption: share of rows whose caption is blanked, for classifier-free guidance.
        corrupt: largest share of input codes replaced at random; each row draws its own share below it.
        depth_weights: weight of each depth's cross-entropy; the last one holds for all deeper ones.
        own: largest share of input tokens replaced by the model's own draws; each row draws its share below it. A
            decoder that has only ever been fed true codes drifts when it is fed its own (scheduled sampling, in
            parallel). Costs a forward pass more.
        alignment: weight of the loss that aligns the temporal attention score with how little MLPs change.
        replay_ratio: largest share of MLPs replayed while training; each step draws its own share below it.
        emphasis: words whose captions are drawn more often, as ``word=times``; the largest of a caption's counts.
        seed: of weights and of the order of everything.
    """

    steps: int = 5000
    clips: int = 8
    first_frames: int = 24
    muon_rate: float = 3e-3
    adam_rate: float = 2e-3
    weight_decay: float = 0.02
    warmup: int = 100
    decay_from: float = 0.55
    drop_caption: float = 0.1
    corrupt: float = 0.06
    depth_weights: tuple[float, ...] = (1.0, 0.7)
    own: float = 0.0
    alignment: float = 0.0
    replay_ratio: float = 0.0
    emphasis: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, at_least_one=("steps", "warmup"), positive=("muon_rate", "adam_rate"))
        _check(self, not_negative=("clips", "first_frames", "weight_decay", "decay_from", "alignment", "seed"))
        _check(self, shares=("drop_caption", "corrupt", "own", "replay_ratio"))
        self.times()
        if self.clips + self.first_frames < 1:
            raise ValueError("clips and first_frames are both 0, so that a step would see nothing")
        if not all(weight >= 0 for weight in self.depth_weights) or not any(self.depth_weights):
            raise ValueError(f"depth_weights must be numbers from 0 on, not all 0, got {self.depth_weights!r}")

    def times(self) -> dict[str, float]:
        """How many times as often captions with a word are drawn."""
        times = {}
        for item in self.emphasis:
            word, _, number = item.partition("=")
            try:
                times[word] = float(number)
            except ValueError:
                times[word] = 0.0
            if not word or not 0 < times[word] < float("inf"):
                raise ValueError(f"emphasis must list word=times, times above 0, got {item!r}")
        return times

    def rate(self, step: int) -> float:
        """The share of the peak rates that holds at a step."""
        begin = self.decay_from * self.steps
        fall = max(0.0, (step - begin) / max(1.0, self.steps - begin))
        return min(1.0, (step + 1) / self.warmup) * (1 - 0.98 * fall)


def _check(
    settings: object,
    *,
    at_least_one: tuple[str, ...] = (),
    positive: tuple[str, ...] = (),
    not_negative: tuple[str, ...] = (),
    shares: tuple[str, ...] = (),
) -> None:
    """Check fields by kind; NaN passes none of the comparisons."""
    checks = (
        (at_least_one, "at least 1", lambda v: v >= 1),
        (positive, "above 0", lambda v: 0 < v < float("inf")),
        (not_negative, "0 or more", lambda v: 0 <= v < float("inf")),
        (shares, "in 0..1", lambda v: 0 <= v <= 1),
    )
    for names, expected, holds in checks:
        for name in names:
            if not holds(getattr(settings, name)):
                raise ValueError(f"{name} must be {expected}, got {getattr(settings, name)!r}")

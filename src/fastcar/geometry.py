"""Where a position lies in a clip, and which position of the frame before it is aligned with it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Geometry"]


@dataclass(frozen=True)
class Geometry:
    """A clip as a sequence: ``frames`` times ``tokens_per_frame`` positions behind a prefix.

    Decode step ``s`` feeds token ``s`` of the clip (the prefix is prefilled) and foretells token ``s + 1``, so the
    last token is never fed and a clip takes ``lead + frames * tokens_per_frame - 1`` steps.

    Attributes:
        frames: frames of the clip (F).
        tokens_per_frame: positions of one frame (N), separators included.
        prefix: positions before the first frame (the prompt).
        never_replay: offsets within a frame whose MLPs always run: separators, action tokens.
        lead: tokens decoded before the first regular frame, a context frame of another size; they never replay.
    """

    frames: int
    tokens_per_frame: int
    prefix: int = 0
    never_replay: tuple[int, ...] = ()
    lead: int = 0

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise ValueError(f"frames must be at least 1, got {self.frames!r}")
        if self.tokens_per_frame < 1:
            raise ValueError(f"tokens_per_frame must be at least 1, got {self.tokens_per_frame!r}")
        if self.prefix < 0:
            raise ValueError(f"prefix must not be negative, got {self.prefix!r}")
        if self.lead < 0:
            raise ValueError(f"lead must not be negative, got {self.lead!r}")
        if any(not 0 <= offset < self.tokens_per_frame for offset in self.never_replay):
            raise ValueError(
                f"never_replay holds offsets within a frame, 0..{self.tokens_per_frame - 1}, got {self.never_replay!r}"
            )

    @property
    def tokens(self) -> int:
        """Tokens of the clip: the lead, and F * N."""
        return self.lead + self.frames * self.tokens_per_frame

    @property
    def steps(self) -> int:
        """Decode steps of the clip: every token but the last is fed."""
        return self.tokens - 1

    @property
    def positions(self) -> int:
        """Positions a KV cache must hold: the prefix and every token fed."""
        return self.prefix + self.steps

    def frame(self, step: int) -> int:
        """The frame of the token that a step feeds; negative in the lead."""
        return (step - self.lead) // self.tokens_per_frame

    def aligned(self, step: int) -> int:
        """The step that fed the token at the same place one frame earlier (paper: j- = j - N); negative if none."""
        return step - self.tokens_per_frame

    def may_replay(self, step: int) -> bool:
        """Whether MLPs may be replayed at a step: from the second frame on, and not at ``never_replay`` offsets."""
        place = step - self.lead
        return place >= self.tokens_per_frame and place % self.tokens_per_frame not in self.never_replay

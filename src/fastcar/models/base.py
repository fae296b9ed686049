"""The contracts between a model family and the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fastcar.decoder.llama import LlamaModel
from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig
from fastcar.sampling import SamplingConfig

__all__ = ["Choose", "DepthHead", "FrameCodec", "Prompts", "VideoModel"]

# (depth, logits [B, V]) -> codes int64 [B]
Choose = Callable[[int, Tensor], Tensor]


class FrameCodec(Protocol):
    """Codes to frames and back."""

    def decode(self, codes: Tensor) -> Tensor:
        """Codes int64 [..., N, D] to frames uint8 [..., H, W, 3]."""
        ...

    def encode(self, frames: Tensor) -> Tensor:
        """Frames uint8 [..., H, W, 3] to codes int64 [..., N, D]."""
        ...


class DepthHead(Protocol):
    """Draws the D codes of one token from the decoder's hidden state."""

    def sample(self, hidden: Tensor, choose: Choose) -> Tensor:
        """Hidden states [B, H] to codes int64 [B, D], asking ``choose`` at every depth."""
        ...


@dataclass
class Prompts:
    """Prompts ready for a decoder.

    Attributes:
        embeds: [B, P, H], left-padded.
        mask: bool [B, P], False at padding; None where there is none to hide.
        state: whatever the family wants back in ``next_input``.
    """

    embeds: Tensor
    mask: Tensor | None
    state: Any = None


class VideoModel(Protocol):
    """A text-to-video model: everything around the decoder.

    Attributes:
        name, family: for people and for the registry.
        decoder: weights of the decoder.
        codec, depth_head: its other two parts.
        depth, codebook_size: D and V.
        frames: how many frames a clip has if nobody says.
        fps: frames a second of a saved clip.
        sampling: the recommended sampling.
    """

    name: str
    family: str
    decoder: LlamaModel
    codec: FrameCodec
    depth_head: DepthHead
    depth: int
    codebook_size: int
    frames: int
    fps: int
    sampling: SamplingConfig

    def geometry(self, frames: int) -> Geometry:
        """The sequence of a clip; the prefix is that of the prompts, once they are embedded.

        Raises:
            ValueError: the model cannot make so many frames.
        """
        ...

    def check_prompt(self, prompt: str) -> list[str]:
        """Warnings about a prompt, each one line.

        Raises:
            ValueError: the prompt cannot be used.
        """
        ...

    def prompts(self, prompts: Sequence[str], guided: bool, frames: int) -> Prompts:
        """Embed prompts for clips of so many frames; with ``guided``, as many blank rows follow."""
        ...

    def next_input(self, prompts: Prompts, codes: Tensor) -> Tensor:
        """Decoder inputs [B, H] for the step that feeds token s, after codes int64 [b, s + 1, D] so far."""
        ...

    def native_depth_head(self, precision: str) -> Callable[[], DepthHead]:
        """Pack the depth head's weights for :mod:`fastcar.decoder.native`; what is returned makes heads over them."""
        ...

    def recommended_replay(self, target_ratio: float) -> ReplayConfig:
        """The replay setting that this model's calibration recommends for a target ratio."""
        ...

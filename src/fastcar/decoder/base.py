"""The protocol that every decode engine follows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig
from fastcar.replay.trace import ReplayTrace

__all__ = ["Decoder"]


class Decoder(Protocol):
    """Decodes one batch at a time: a prefill, then one step a position.

    A prefill resets everything; nothing of an earlier clip remains. Rows never influence one another, except that
    both rows of a guidance pair may be asked to replay together.
    """

    config: DecoderConfig
    name: str

    def prefill(
        self,
        embeds: Tensor,
        geometry: Geometry,
        *,
        mask: Tensor | None = None,
        replay: ReplayConfig | None = None,
        attention: AttentionConfig | None = None,
        pairs: bool = False,
    ) -> Tensor:
        """Feed the prompts and make room for a clip.

        Args:
            embeds: [B, P, H], left-padded; P must be ``geometry.prefix``.
            geometry: of the clip to come.
            mask: bool [B, P], False at padding; no padding if not given.
            replay: when to replay MLPs; dense if not given.
            attention: what decoded tokens attend to; everything before them if not given.
            pairs: rows b and b + B/2 are the conditional and the blank row of one clip.

        Returns:
            Hidden states [B, H] of the last prompt position, after the final norm.
        """
        ...

    def step(self, embeds: Tensor) -> Tensor:
        """Feed one token a row, embeddings [B, H], and return hidden states [B, H] after the final norm.

        Raises:
            RuntimeError: before a prefill, or past the last step of the clip.
        """
        ...

    def reset(self) -> None:
        """Forget the clip and free its memory."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by part: ``weights``, ``kv_cache``, ``replay``."""
        ...

    def trace(self) -> ReplayTrace:
        """What was decided since the last prefill."""
        ...

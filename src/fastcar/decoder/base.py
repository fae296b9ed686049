"""The protocol that every decode engine follows."""

from __future__ import annotations

import os
from typing import Protocol

from torch import Tensor

from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig
from fastcar.replay.trace import ReplayTrace

__all__ = ["Decoder", "check_prompt", "check_room", "check_step"]


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


def check_prompt(config: DecoderConfig, embeds: Tensor, geometry: Geometry) -> None:
    """What every engine asks of a prefill.

    Raises:
        ValueError: the embeddings are not [B, P, H] of the decoder and the clip.
    """
    if embeds.dim() != 3 or embeds.shape[1:] != (geometry.prefix, config.hidden_size) or 0 in embeds.shape:
        raise ValueError(
            f"prompt embeddings must be [rows, {geometry.prefix} >= 1, {config.hidden_size}], got {tuple(embeds.shape)}"
        )


def check_step(config: DecoderConfig, embeds: Tensor, rows: int, geometry: Geometry | None, steps: int) -> None:
    """What every engine asks of a step, after so many of them.

    Raises:
        RuntimeError: before a prefill (no geometry), or past the last step of the clip.
        ValueError: the embeddings are not [rows, H].
    """
    if geometry is None:
        raise RuntimeError("step before prefill: feed the prompts first")
    if steps >= geometry.steps:
        raise RuntimeError(f"the clip has {geometry.steps} decode steps and all are done")
    if embeds.shape != (rows, config.hidden_size):
        raise ValueError(f"embeddings must be {(rows, config.hidden_size)}, got {tuple(embeds.shape)}")


def check_room(
    config: DecoderConfig,
    rows: int,
    geometry: Geometry,
    attention: AttentionConfig,
    replay: ReplayConfig | None,
    itemsize: int,
) -> None:
    """Refuse a clip whose keys, values and rings exceed the machine.

    Args:
        itemsize: bytes of a number of the cache.

    Raises:
        ValueError: with the sums.
    """
    if not hasattr(os, "sysconf"):
        return
    cache = 2 * config.layers * rows * config.kv_heads * config.head_dim * itemsize * attention.slots(geometry)
    # of outputs and of inputs; keys take less
    rings = 2 * config.layers * rows * config.hidden_size * itemsize * geometry.tokens_per_frame if replay else 0
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if cache + rings > have:
        raise ValueError(
            f"{rows} rows of {geometry.frames} frames need a KV cache of {cache / 2**30:.1f} GiB and "
            f"{rings / 2**30:.1f} GiB to replay, but this machine has {have / 2**30:.1f} GiB; ask for fewer frames or "
            "clips, or for a window"
        )

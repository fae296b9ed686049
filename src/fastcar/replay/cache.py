"""The state of replay during one generation: rings of the last N positions, and the decision itself."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig
from fastcar.replay.policy import Policy, make_policy
from fastcar.replay.score import SCORES, LayerState
from fastcar.replay.trace import ReplayTrace

__all__ = ["ReplayCache"]


class ReplayCache:
    """Rings of the last N positions, allocated once, and what a run decided.

    A position's slot is that of its aligned position: what is read there is either overwritten, or left in place, and
    that is the replay. A layer calls :meth:`decide` before its MLP and writes the outputs it computes into
    :meth:`outputs_of`; a step ends with :meth:`advance`.

    Args:
        rows: B. With ``pairs``, rows b and b + B/2 are the two of a guidance pair.
        hidden, kv_heads, head_dim: sizes of what is remembered.
    """

    def __init__(
        self,
        config: ReplayConfig,
        geometry: Geometry,
        layers: int,
        rows: int,
        hidden: int,
        kv_heads: int,
        head_dim: int,
        *,
        pairs: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if pairs and rows % 2:
            raise ValueError(f"guidance pairs need an even number of rows, got {rows!r}")
        self.config, self.geometry, self.pairs, self.rows = config, geometry, pairs, rows
        self.tied = 2 if pairs and config.tie_guidance else 1  # rows that decide as one
        self.score = SCORES[config.score]
        self.policy: Policy = make_policy(
            config, layers, rows // self.tied, geometry.tokens_per_frame, torch.device(device)
        )

        def ring(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(layers, geometry.tokens_per_frame, rows, *shape, dtype=dtype, device=device)

        self.outputs = ring(hidden)
        self.remembered: Tensor | None = None
        if self.score.remembers:
            self.remembered = ring(hidden) if self.score.remembers == "input" else ring(kv_heads, head_dim)
        # how many frames in a row each output has been replayed; kept only where somebody asks
        self.age = None if config.max_age is None else ring(dtype=torch.int32)
        self.scores = torch.full((geometry.steps, layers, rows), torch.nan, device=device)
        self.replayed = torch.zeros(geometry.steps, layers, rows, dtype=torch.bool, device=device)
        self.decided: list[tuple[Tensor, Tensor]] = []
        self.step = 0

    def memory(self) -> int:
        """Bytes of the rings."""
        tensors = (self.outputs, self.remembered, self.age)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def decide(self, layer: int, state: LayerState) -> list[int]:
        """The rows that must compute this layer's MLP at the current step; all others replay."""
        slot = self.step % self.geometry.tokens_per_frame
        remembered = None if self.remembered is None else self.remembered[layer, slot]
        computing = list(range(self.rows))
        if self.geometry.may_replay(self.step):
            scores = self.score.compute(state, remembered)
            if self.tied == 2:
                scores = torch.minimum(*scores.chunk(2))
            mask = self.policy.decide(layer, scores)
            if self.age is not None and self.config.max_age is not None:
                mask = mask & (self.age[layer, slot, : len(mask)] < self.config.max_age)
            self.decided.append((scores, mask))
            computing = [row for row, replayed in enumerate(mask.tolist() * self.tied) if not replayed]
        if self.age is not None:
            self.age[layer, slot] += 1
            self.age[layer, slot, computing] = 0
        if remembered is not None:
            if self.score.remembers == "key":
                remembered.copy_(state.rotated_key)
            elif len(computing) == self.rows:
                remembered.copy_(state.mlp_input)
            elif computing:  # a replayed output keeps the input that produced it
                remembered[computing] = state.mlp_input[computing]
        return computing

    def outputs_of(self, layer: int) -> Tensor:
        """The ring's slot of the current step, [B, H]: until written, the outputs of the aligned position."""
        return self.outputs[layer, self.step % self.geometry.tokens_per_frame]

    def advance(self) -> None:
        """End a step."""
        if self.decided:
            scores, masks = (torch.stack(part) for part in zip(*self.decided, strict=True))
            self.scores[self.step], self.replayed[self.step] = scores.repeat(1, self.tied), masks.repeat(1, self.tied)
            self.policy.observe(scores, masks)
            self.decided.clear()
        self.step += 1

    def trace(self) -> ReplayTrace:
        """What was decided so far."""
        return ReplayTrace(
            scores=self.scores[: self.step].float().cpu().numpy(),
            replayed=self.replayed[: self.step].cpu().numpy(),
            geometry=self.geometry,
            config=self.config,
            pairs=self.pairs,
        )

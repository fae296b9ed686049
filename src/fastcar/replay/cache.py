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
    """Rings allocated once and written in place, one slot a position, and what a run decided.

    A layer calls :meth:`decide` before its MLP and :meth:`finish` after; a step ends with :meth:`advance`.
    Rings hold exactly the last N positions: a slot is read at the aligned position, then overwritten.

    Args:
        rows: B. With ``pairs``, rows b and b + B/2 are the two of a guidance pair.
        kv_heads, head_dim, hidden: sizes of what is remembered.
        slack: slots beyond N, so that positions not yet accepted can be taken back.
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
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if pairs and rows % 2:
            raise ValueError(f"guidance pairs need an even number of rows, got {rows!r}")
        self.config, self.geometry, self.pairs = config, geometry, pairs
        self.score = SCORES[config.score]
        self.policy: Policy = make_policy(config, layers, rows, geometry.tokens_per_frame, torch.device(device))
        self.slots = geometry.tokens_per_frame + slack

        def ring(*shape: int) -> Tensor:
            return torch.zeros(layers, self.slots, rows, *shape, dtype=dtype, device=device)

        self.outputs = ring(hidden)
        self.remembered = {"key": lambda: ring(kv_heads, head_dim), "input": lambda: ring(hidden), None: lambda: None}[
            self.score.remembers
        ]()
        # how many frames in a row each output has been replayed; kept only where somebody asks
        self.age = None if config.max_age is None else ring().int()
        self.scores = torch.full((geometry.steps, layers, rows), torch.nan, device=device)
        self.replayed = torch.zeros(geometry.steps, layers, rows, dtype=torch.bool, device=device)
        self.step = 0

    def memory(self) -> int:
        """Bytes of the rings."""
        tensors = (self.outputs, self.remembered, self.age)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def decide(self, layer: int, state: LayerState) -> Tensor:
        """Which rows replay this layer's MLP at the current step: bool [B]."""
        slot = self.step % self.slots
        aligned = self.geometry.aligned(self.step) % self.slots
        mask = self.replayed[self.step, layer]
        before = None if self.remembered is None else self.remembered[layer, aligned]
        now = state.rotated_key if self.score.remembers == "key" else state.mlp_input
        if self.geometry.may_replay(self.step):
            scores = self.score.compute(state, before)
            if self.pairs and self.config.tie_guidance:
                scores = scores.view(2, -1).amin(0).repeat(2)
            self.scores[self.step, layer] = scores
            mask.copy_(self.policy.decide(layer, scores))
            if self.age is not None and self.config.max_age is not None:
                mask &= self.age[layer, aligned] < self.config.max_age
            if self.score.remembers == "input" and before is not None:
                now = torch.where(mask[:, None], before, now)  # a replayed output keeps the input that produced it
        if self.remembered is not None:
            self.remembered[layer, slot] = now
        return mask

    def aligned_output(self, layer: int) -> Tensor:
        """The MLP outputs [B, H] in the ring at the aligned position."""
        return self.outputs[layer, self.geometry.aligned(self.step) % self.slots]

    def finish(self, layer: int, output: Tensor) -> None:
        """Put the MLP outputs that were used [B, H], computed or replayed, into the ring."""
        slot, aligned = self.step % self.slots, self.geometry.aligned(self.step) % self.slots
        self.outputs[layer, slot] = output
        if self.age is not None:
            self.age[layer, slot] = (self.age[layer, aligned] + 1) * self.replayed[self.step, layer]

    def advance(self) -> None:
        """End a step."""
        if self.geometry.may_replay(self.step):
            self.policy.observe(self.scores[self.step], self.replayed[self.step])
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

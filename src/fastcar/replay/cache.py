"""The state of replay during one generation: rings of the last N positions, and the decision itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig
from fastcar.replay.policy import Policy, make_policy
from fastcar.replay.score import SCORES, LayerState
from fastcar.replay.trace import ReplayTrace

__all__ = ["ReplayCache"]


class ReplayCache:
    """Rings of the last N positions, and what a run decided.

    A position's slot is that of its aligned position: what is read there is either overwritten, or left in place, and
    that is the replay. A layer calls :meth:`mlp` in place of its MLP; a step ends with :meth:`advance`.

    A clip may go on beyond the geometry's frames: the record of decisions then grows, and nothing else does.

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
    ) -> None:
        if pairs and rows % 2:
            raise ValueError(f"guidance pairs need an even number of rows, got {rows!r}")
        self.config, self.geometry, self.pairs, self.rows = config, geometry, pairs, rows
        self.tied = 2 if pairs and config.tie_guidance else 1  # rows that decide as one
        self.score = SCORES[config.score]
        self.policy: Policy = make_policy(config, layers, rows // self.tied, geometry, dtype)

        n = geometry.tokens_per_frame
        # A slot holds the very tensors that the layer made: nothing is copied where every row computes.
        self.outputs: list[list[Tensor | None]] = [[None] * n for _ in range(layers)]
        self.remembered: list[list[Tensor | None]] = [[None] * n for _ in range(layers)]
        sizes = {None: 0, "input": hidden, "key": kv_heads * head_dim}
        self.bytes = layers * n * rows * (hidden + sizes[self.score.remembers]) * dtype.itemsize
        # how many frames in a row each output has been replayed
        self.age = np.zeros((layers, n, rows // self.tied), np.int32)
        self.scores = np.full((geometry.steps or 1, layers, rows // self.tied), np.nan, np.float32)
        self.replayed = np.zeros(self.scores.shape, bool)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Turn to a step."""
        self.step, self.slot = step, step % self.geometry.tokens_per_frame
        self.may_replay = self.geometry.may_replay(step)

    def _grow(self) -> None:
        """Make room for the record of the current step."""
        if self.step >= len(self.scores):
            self.scores = np.concatenate((self.scores, np.full_like(self.scores, np.nan)))
            self.replayed = np.concatenate((self.replayed, np.zeros_like(self.replayed)))

    def memory(self) -> int:
        """Bytes of the rings, once they are full."""
        return self.bytes

    def decide(self, layer: int, state: LayerState) -> list[int]:
        """The rows that must compute this layer's MLP at the current step; all others replay."""
        if not self.may_replay:
            return list(range(self.rows))
        scores = self.score.compute(state, self.remembered[layer][self.slot])
        if self.tied == 2:
            half = self.rows // 2
            scores = np.minimum(scores[:half], scores[half:])
        mask = self.policy.decide(layer, scores)
        if self.config.max_age is not None:
            age = self.age[layer, self.slot]
            mask = mask & (age < self.config.max_age)
            age[:] = (age + 1) * mask
        self._grow()
        self.scores[self.step, layer], self.replayed[self.step, layer] = scores, mask
        return [row for row, replays in enumerate(mask.tolist() * self.tied) if not replays]

    def mlp(self, layer: int, mlp: Callable[[Tensor], Tensor], state: LayerState) -> Tensor:
        """What the layer's MLP gives, [B, H]: computed for the rows that must, replayed for the others."""
        outputs, remembered = self.outputs[layer], self.remembered[layer]
        computing = self.decide(layer, state)
        if self.score.remembers == "key":
            remembered[self.slot] = state.rotated_key[:, :, 0]
        then, output = remembered[self.slot], outputs[self.slot]
        if len(computing) == self.rows or output is None:
            if self.score.remembers == "input":
                remembered[self.slot] = state.mlp_input
            output = outputs[self.slot] = mlp(state.mlp_input)
        elif computing:
            # neighbours as a slice, which reads and writes in place
            first, end = computing[0], computing[-1] + 1
            rows = slice(first, end) if end - first == len(computing) else computing
            if self.score.remembers == "input":  # a replayed output keeps the input that produced it
                assert then is not None
                then[rows] = state.mlp_input[rows]
            output[rows] = mlp(state.mlp_input[rows])
        return output

    def advance(self) -> None:
        """End a step."""
        self._grow()
        if self.may_replay:
            self.policy.observe(self.scores[self.step], self.replayed[self.step])
        self.begin(self.step + 1)

    def trace(self) -> ReplayTrace:
        """What was decided so far."""
        g, fed = self.geometry, self.step + 1 - self.geometry.lead
        frames = max(g.frames, -(-fed // g.tokens_per_frame))
        return ReplayTrace(
            scores=np.tile(self.scores[: self.step], self.tied),
            replayed=np.tile(self.replayed[: self.step], self.tied),
            geometry=replace(g, frames=frames),
            config=self.config,
            pairs=self.pairs,
        )

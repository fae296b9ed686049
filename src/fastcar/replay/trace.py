"""The record of a run's decisions, and its statistics: the one thing that links generation to all that studies it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fastcar.geometry import Geometry
from fastcar.replay.config import ReplayConfig

__all__ = ["ReplayStats", "ReplayTrace"]


@dataclass(frozen=True)
class ReplayStats:
    """What replay did in one run.

    Attributes:
        replay_ratio: replayed MLPs among those that could replay (from the second frame on, all layers).
        replay_share_of_all: replayed MLPs among all of the run's decode steps.
        both_rows_rate: among guidance pairs that could replay, the share where both rows did; without pairs, the
            share of positions and layers where every row did.
        mlp_rows_total: MLP evaluations a dense run needs (steps x layers x rows).
        mlp_rows_replayed: those that were skipped.
        mlp_reads_total: times a dense run reads a layer's MLP weights (steps x layers).
        mlp_reads_skipped: those in which every row replayed, so that the weights need not be read at all.
        by_layer: replay ratio of each layer.
        by_frame: replay ratio of each frame (0 in the first).
        by_branch: replay ratio of conditional and blank rows, or of all rows where there are no pairs.
    """

    replay_ratio: float
    replay_share_of_all: float
    both_rows_rate: float
    mlp_rows_total: int
    mlp_rows_replayed: int
    mlp_reads_total: int
    mlp_reads_skipped: int
    by_layer: tuple[float, ...]
    by_frame: tuple[float, ...]
    by_branch: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class ReplayTrace:
    """Decisions of S steps, L layers and B rows.

    Attributes:
        scores: float32 [S, L, B]; NaN where nothing could be decided (first frame, separators).
        replayed: bool [S, L, B].
        geometry: of the clip.
        config: the settings, or None for a dense run.
        pairs: whether rows b and b + B/2 are guidance pairs.
    """

    scores: np.ndarray
    replayed: np.ndarray
    geometry: Geometry
    config: ReplayConfig | None
    pairs: bool

    def __post_init__(self) -> None:
        if self.scores.shape != self.replayed.shape or self.scores.ndim != 3:
            raise ValueError(
                f"scores {self.scores.shape} and replayed {self.replayed.shape} must both be [steps, layers, rows]"
            )

    @classmethod
    def dense(cls, geometry: Geometry, layers: int, rows: int, pairs: bool) -> ReplayTrace:
        """The trace of a run without replay."""
        shape = (geometry.steps, layers, rows)
        return cls(np.full(shape, np.nan, np.float32), np.zeros(shape, bool), geometry, None, pairs)

    def rows(self, index: list[int]) -> ReplayTrace:
        """The trace of some rows alone."""
        return ReplayTrace(self.scores[..., index], self.replayed[..., index], self.geometry, self.config, self.pairs)

    def statistics(self) -> ReplayStats:
        """Count what was replayed."""
        steps = len(self.replayed)
        could = np.array([self.geometry.may_replay(s) for s in range(steps)], dtype=bool)
        eligible = self.replayed[could]
        frame = np.array([self.geometry.frame(s) for s in range(steps)])
        halves = np.split(eligible, 2, -1) if self.pairs else [eligible]
        both = np.logical_and(*halves) if self.pairs else eligible.all(-1)

        def mean(mask: np.ndarray) -> float:
            return float(mask.mean()) if mask.size else 0.0

        return ReplayStats(
            replay_ratio=mean(eligible),
            replay_share_of_all=mean(self.replayed),
            both_rows_rate=mean(both),
            mlp_rows_total=int(self.replayed.size),
            mlp_rows_replayed=int(self.replayed.sum()),
            mlp_reads_total=int(np.prod(self.replayed.shape[:2])),
            mlp_reads_skipped=int(self.replayed.all(-1).sum()),
            by_layer=tuple(mean(eligible[:, layer]) for layer in range(self.replayed.shape[1])),
            by_frame=tuple(mean(self.replayed[could & (frame == f)]) for f in range(int(frame.max(initial=0)) + 1)),
            by_branch=tuple(mean(half) for half in halves),
        )

    def save(self, path: str | Path) -> None:
        """Write a compressed ``.npz``, whole or not at all."""
        path = Path(path)
        if not path.parent.is_dir():
            raise NotADirectoryError(f"{path} cannot be written: there is no folder {path.parent}")
        about = {
            "geometry": asdict(self.geometry),
            "config": self.config.to_dict() if self.config else None,
            "pairs": self.pairs,
        }
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                np.savez_compressed(
                    file, scores=self.scores, replayed=np.packbits(self.replayed), about=np.array(json.dumps(about))
                )
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> ReplayTrace:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: the file is no trace.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                scores, packed, about = file["scores"], file["replayed"], json.loads(str(file["about"]))
            replayed = np.unpackbits(packed, count=scores.size).astype(bool).reshape(scores.shape)
            geometry = about["geometry"]
            geometry["never_replay"] = tuple(geometry["never_replay"])
            config = about["config"] and ReplayConfig.from_dict(about["config"])
            return cls(scores, replayed, Geometry(**geometry), config, about["pairs"])
        except FileNotFoundError:
            raise
        except Exception as error:  # a damaged zip, header or JSON fails in as many ways as there are bytes
            raise ValueError(f"{path} is no replay trace ({error})") from error

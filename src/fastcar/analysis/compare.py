"""One prompt, one seed, densely and with replay: what replay saves and what it costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.metrics.image import psnr, ssim
from fastcar.pipeline import Clip, Pipeline
from fastcar.replay.config import ReplayConfig

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """A dense and a replayed clip of the same prompt, seed and noise.

    Attributes:
        dense, replay: the two clips, of the first round.
        speedups: dense decode time over replayed decode time, of every round.
        ceilings: likewise for the same clip with every MLP replayed from the second frame on: what this engine would
            gain at most. Empty if not run.
        psnr: of the replayed clip to the dense one, dB (infinite if equal).
        ssim: likewise, at most 1.
    """

    dense: Clip
    replay: Clip
    speedups: tuple[float, ...]
    ceilings: tuple[float, ...]
    psnr: float
    ssim: float

    @property
    def speedup(self) -> float:
        """Median of ``speedups``."""
        return statistics.median(self.speedups)

    @property
    def speedup_ceiling(self) -> float | None:
        """Median of ``ceilings``; None if not run."""
        return statistics.median(self.ceilings) if self.ceilings else None

    def to_dict(self) -> dict[str, object]:
        """JSON-ready; an infinite PSNR is None, as JSON has no infinity."""
        return {
            "dense": self.dense.stats.to_dict(),
            "replay": self.replay.stats.to_dict(),
            "speedup": self.speedup,
            "speedups": list(self.speedups),
            "speedup_ceiling": self.speedup_ceiling,
            "psnr": self.psnr if math.isfinite(self.psnr) else None,
            "ssim": self.ssim,
        }

    def save_sheet(self, path: Path) -> Path:
        """Write a contact sheet with both clips."""
        from fastcar.video import write_sheet

        ratio = self.replay.stats.replay.replay_ratio
        return write_sheet([("dense", self.dense.frames), (f"replay {ratio:.2f}", self.replay.frames)], path)

    def __str__(self) -> str:
        d, r = self.dense.stats, self.replay.stats
        lines = [f"{'':14}{'dense':>10}{'replay':>10}"]
        rows = [("seconds", d.timing.total, r.timing.total), ("decode", d.timing.decode, r.timing.decode)]
        rows += [(f"  {part}", d.timing.parts[part], r.timing.parts[part]) for part in d.timing.parts]
        rows += [("ms a token", d.ms_per_token, r.ms_per_token)]
        lines += [f"{name.replace('_', ' '):14}{a:10.2f}{b:10.2f}" for name, a, b in rows]
        ceiling = f"; {self.speedup_ceiling:.2f}x with every MLP replayed" if self.speedup_ceiling else ""
        rounds = f"{len(self.speedups)} rounds, {min(self.speedups):.2f}-{max(self.speedups):.2f}"
        lines.append(
            f"speed-up of decode {self.speedup:.2f}x ({rounds}{ceiling}); {r.replay.mlp_rows_replayed} of "
            f"{r.replay.mlp_rows_total} MLP rows skipped, replay ratio {r.replay.replay_ratio:.3f}, "
            f"both rows {r.replay.both_rows_rate:.3f}"
        )
        lines.append(f"to the dense clip: PSNR {self.psnr:.2f} dB, SSIM {self.ssim:.4f}")
        return "\n".join(lines)


def compare(
    pipe: Pipeline,
    prompt: str,
    replay: float | ReplayConfig,
    *,
    attention: AttentionConfig | None = None,
    ceiling: bool = True,
    rounds: int = 3,
    progress: Callable[[str], Callable[[int, int], None] | None] = lambda name: None,
    **options: Any,
) -> Comparison:
    """Generate a prompt densely and with replay; ``options`` as for a :class:`Pipeline` call.

    A short clip is generated and thrown away first, so that neither side pays for warming up. Both sides are timed in
    turns, since on a shared machine one run of each says little.

    Args:
        attention: of the replayed side; the dense one always attends to everything.
        ceiling: also run with every MLP replayed, to know the most this engine could gain.
        rounds: how often every side is generated.
        progress: called with ``"dense"``, ``"replay"`` and ``"ceiling"`` for the progress callback of each run.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds!r}")
    config = pipe.replay_config(replay)
    small = pipe(prompt, **{**options, "frames": 1}).frames
    ssim(small, small)  # frames too small to be compared are told before any time is spent
    wanted: dict[str, ReplayConfig | None] = {"dense": None, "replay": config}
    if ceiling:
        wanted["ceiling"] = ReplayConfig(threshold=-math.inf, score="random")
    clips: dict[str, list[Clip]] = {name: [] for name in wanted}
    for _ in range(rounds):
        for name, setting in wanted.items():
            seen = AttentionConfig() if name == "dense" else attention
            clips[name].append(pipe(prompt, replay=setting, attention=seen, progress=progress(name), **options))

    def ratios(name: str) -> tuple[float, ...]:
        pairs = zip(clips["dense"], clips.get(name, []), strict=False)
        return tuple(dense.stats.timing.decode / other.stats.timing.decode for dense, other in pairs)

    dense, replayed = clips["dense"][0], clips["replay"][0]
    return Comparison(
        dense,
        replayed,
        ratios("replay"),
        ratios("ceiling"),
        psnr(dense.frames, replayed.frames),
        ssim(dense.frames, replayed.frames),
    )

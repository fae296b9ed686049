"""Does a model show what its prompts say? Measured on the captioned world, with held-out prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastcar.metrics.image import psnr
from fastcar.metrics.world import Judgement, adherence, judge
from fastcar.pipeline import Clip, Pipeline
from fastcar.replay.config import ReplayConfig
from fastcar.training import world

__all__ = ["WorldEvaluation", "evaluate_world", "held_out_prompts"]


@dataclass(frozen=True, eq=False)
class WorldEvaluation:
    """Clips of held-out prompts and what they were judged to show.

    Attributes:
        scenes, prompts, seeds: what was asked for, one each a clip.
        clips: what was generated; None where the frames were rendered instead.
        judgements: one a clip.
        replay_ratio: mean over the clips.
        reconstruction_psnr: mean over the scenes of the rendered clip's PSNR through the codec, dB: the quality that
            no clip can exceed; None where the frames were rendered.
    """

    scenes: list[world.Scene]
    prompts: list[str]
    seeds: list[int]
    clips: list[Clip] | None
    judgements: list[Judgement]
    replay_ratio: float
    reconstruction_psnr: float | None

    def summary(self) -> dict[str, dict[str, float]]:
        """``colour``, ``shape``, ``motion``, ``background``: mean and 95 % Wilson interval."""
        return adherence(self.judgements)

    def details(self) -> dict[str, dict[str, tuple[int, int]]]:
        """For ``colour``, ``shape`` and ``motion``: of the first sprites that ask for each value, (right, all)."""
        details: dict[str, dict[str, tuple[int, int]]] = {}
        for name in ("colour", "shape", "motion"):
            counts: dict[str, tuple[int, int]] = {}
            for scene, judgement in zip(self.scenes, self.judgements, strict=True):
                value = getattr(scene.sprites[0], name)
                right, of = counts.get(value, (0, 0))
                counts[value] = (right + getattr(judgement, name), of + 1)
            details[name] = dict(sorted(counts.items()))
        return details


def held_out_prompts(
    count: int, seed: int = 0, split: str = "test", objects: int = 1
) -> tuple[list[world.Scene], list[str]]:
    """Scenes and full captions of combinations that training never shows."""
    scenes = [world.sample(split, seed, index, objects=objects)[0] for index in range(count)]
    return scenes, [world.caption(scene, full=True) for scene in scenes]


def evaluate_world(
    pipe: Pipeline | None,
    prompts: int = 200,
    seed: int = 0,
    *,
    replay: float | ReplayConfig | None = None,
    split: str = "test",
    objects: int = 1,
    batch: int = 25,
    frozen: bool = False,
    reconstructed: bool = False,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> WorldEvaluation:
    """Generate held-out prompts, one clip each, and judge the frames.

    Args:
        pipe: the model; None renders the scenes instead, which measures the measuring.
        seed: of prompts and clips.
        batch: clips generated together; results do not depend on it.
        frozen: repeat each clip's first frame, a control that no image metric tells from a working clip.
        reconstructed: judge the rendered scenes through the model's codec instead, the most a clip can reach.
        progress: called with the clips just finished.
        options: sampling, as for a :class:`Pipeline` call.

    Raises:
        ValueError: no prompts, or an unknown split.
    """
    if prompts < 1 or batch < 1:
        raise ValueError(f"prompts and batch must be at least 1, got {prompts!r} and {batch!r}")
    if not 0 <= seed < 2**40:
        raise ValueError(f"seed must lie in 0..2**40-1, got {seed!r}")
    scenes, captions = held_out_prompts(prompts, seed, split, objects)
    seeds = [seed * 1_000_003 + index for index in range(prompts)]
    clips: list[Clip] = []
    judgements: list[Judgement] = []
    for start in range(0, prompts, batch):
        part = slice(start, min(start + batch, prompts))
        if pipe is None:
            frames = [world.render(scene) for scene in scenes[part]]
        elif reconstructed:
            truth = torch.from_numpy(np.stack([world.render(scene) for scene in scenes[part]]))
            frames = list(pipe.model.codec.decode(pipe.model.codec.encode(truth)).cpu().numpy())
        else:
            made = pipe.batch(captions[part], seeds[part], replay=replay, **options)
            clips += made
            frames = [clip.frames for clip in made]
        if frozen:
            frames = [np.repeat(f[:1], len(f), 0) for f in frames]
        judgements += [judge(f, scene) for f, scene in zip(frames, scenes[part], strict=True)]
        if progress:
            progress(len(frames))
    ratio = float(np.mean([clip.stats.replay.replay_ratio for clip in clips])) if clips else 0.0
    quality = _reconstruction_psnr(pipe, scenes) if pipe else None
    return WorldEvaluation(scenes, captions, seeds, clips or None, judgements, ratio, quality)


def _reconstruction_psnr(pipe: Pipeline, scenes: list[world.Scene]) -> float:
    codec, values = pipe.model.codec, []
    for scene in scenes:
        truth = world.render(scene)[:: world.FRAMES - 1]  # the first and the last frame
        values.append(psnr(truth, codec.decode(codec.encode(torch.from_numpy(truth))).cpu().numpy()))
    return float(np.mean(values))

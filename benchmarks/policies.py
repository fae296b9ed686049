"""What does replay cost, by policy? Adherence of held-out prompts, paired with the dense clips of the same seeds.

PSNR, SSIM and colour hardly tell a working clip from a frozen one, so the yardstick is whether the clip still shows
the shape and the motion that its prompt asks for; the frozen first frame stands in the table to show it. Motion is
counted over objects that move (all but "still"), and paired: "lost" are clips whose dense twin moved right and that
do not, "won" the reverse. Ratios are achieved ones, over all layers from the second frame on. Speed-ups are of batches
of 25 clips, one policy after another; ``benchmarks.replay`` measures speed properly, one clip at a time and in turns.

    python -m benchmarks.policies [--prompts 100] [--seeds 2] [--only input-0.5,window-4+input-0.5] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np

import fastcar
from fastcar import AttentionConfig
from fastcar.analysis.evaluate import evaluate_world
from fastcar.metrics.image import psnr, ssim
from fastcar.metrics.world import Judgement, adherence, judge
from fastcar.replay import ReplayConfig
from fastcar.training.world import Scene

POLICIES: dict[str, ReplayConfig | None] = {
    "dense": None,
    "frozen first frame": None,
    "input-0.5": ReplayConfig(target_ratio=0.5, score="input"),
    "input-0.55-tied": ReplayConfig(target_ratio=0.55, score="input", tie_guidance=True),
    "input-0.8": ReplayConfig(target_ratio=0.8, score="input"),
    "input-0.8-tied": ReplayConfig(target_ratio=0.8, score="input", tie_guidance=True),
    "input-0.8-age-6": ReplayConfig(target_ratio=0.8, score="input", max_age=6),
    "tas-0.5": ReplayConfig(target_ratio=0.5, score="tas"),
    "tas-0.8": ReplayConfig(target_ratio=0.8, score="tas"),
    "tas-0.5-without-0": ReplayConfig(target_ratio=0.5, score="tas", exclude_layers=(0,)),
    "tas-0.8-without-0": ReplayConfig(target_ratio=0.8, score="tas", exclude_layers=(0,)),
    "random-0.5": ReplayConfig(target_ratio=0.5, score="random"),
    "random-0.8": ReplayConfig(target_ratio=0.8, score="random"),
    "all-age-1": ReplayConfig(threshold=-math.inf, max_age=1, score="random"),
    "all-age-4": ReplayConfig(threshold=-math.inf, max_age=4, score="random"),
}
# Each may stand behind a window: "window-64", "window-64+input-0.5", and with "-prompt" the whole prompt for sinks.
WINDOWS = {
    f"window-{window}{'-prompt' if sinks == 'prompt' else ''}": AttentionConfig(window=window, sinks=sinks)
    for window in (64, 16, 4)
    for sinks in (4, "prompt")
}


def setting(name: str) -> tuple[ReplayConfig | None, AttentionConfig | None]:
    window, _, policy = name.partition("+")
    return (POLICIES.get(policy), WINDOWS[window]) if window in WINDOWS else (POLICIES[name], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--split", default="test")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--only", help=f"names separated by commas, of {', '.join((*POLICIES, *WINDOWS))} or W+P")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(POLICIES)
    known = {*POLICIES, *WINDOWS, *(f"{w}+{p}" for w in WINDOWS for p in POLICIES)}
    if unknown := ", ".join(sorted(set(names) - known)):
        parser.error(f"unknown policies {unknown}; known are {', '.join((*POLICIES, *WINDOWS))}, and W+P")

    pipe = fastcar.load(args.model)
    rows: dict[str, dict[str, object]] = {}
    dense_frames, dense_motion, dense_seconds = [], np.zeros(0, bool), 0.0
    judgements: list[Judgement] = []
    clips: list[fastcar.Clip] = []
    scenes: list[Scene] = []
    frozen = [name for name in names if name.startswith("frozen")]
    for name in ["dense", *frozen, *(n for n in names if n != "dense" and n not in frozen)]:
        if name.startswith("frozen"):
            frames = [np.repeat(f[:1], len(f), 0) for f in dense_frames]
            judgements = [judge(f, scene) for f, scene in zip(frames, scenes, strict=True)]
        else:
            replay, attention = setting(name)
            judgements, clips, scenes = [], [], []
            for seed in range(args.seeds):
                run = evaluate_world(pipe, args.prompts, seed, replay=replay, attention=attention, split=args.split)
                judgements += run.judgements
                scenes += run.scenes
                clips += run.clips or []
            frames = [c.frames for c in clips]
        moving = np.array([scene.sprites[0].motion != "still" for scene in scenes])
        motion = np.array([j.motion for j in judgements])[moving]
        seconds = sum(c.stats.timing.decode / c.stats.clips_in_batch for c in clips)
        if name == "dense":
            dense_frames, dense_motion, dense_seconds = frames, motion, seconds
        likeness = [psnr(a, b) for a, b in zip(dense_frames, frames, strict=True)]
        rows[name] = {
            "replay_ratio": statistics.mean(c.stats.replay.replay_ratio for c in clips),
            "both_rows_rate": statistics.mean(c.stats.replay.both_rows_rate for c in clips),
            "adherence": adherence(judgements),
            "moving": adherence([j for j, m in zip(judgements, moving, strict=True) if m])["motion"],
            "motion_lost": int((dense_motion & ~motion).sum()),
            "motion_won": int((~dense_motion & motion).sum()),
            "psnr": statistics.mean(min(p, 60.0) for p in likeness),
            "psnr_median": statistics.median(min(p, 60.0) for p in likeness),
            "ssim": statistics.mean(ssim(a, b) for a, b in zip(dense_frames, frames, strict=True)),
            "speedup": dense_seconds / seconds,
            "kv_cache_bytes": clips[0].stats.kv_cache_bytes // clips[0].stats.clips_in_batch,
            "by_layer": np.mean([c.stats.replay.by_layer for c in clips], 0).tolist(),
        }
        print(f"{name} done", file=sys.stderr, flush=True)

    clips_each = args.prompts * args.seeds
    print(f"{args.model}, {clips_each} clips of {args.prompts} {args.split} prompts x {args.seeds} seeds")
    print(
        "| policy | ratio | both rows | colour | shape | motion of moving objects | lost / won | PSNR | SSIM | speed |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        means = (row["adherence"]["colour"], row["adherence"]["shape"], row["moving"])  # type: ignore[index]
        cells = [f"{s['mean']:.2f} [{s['low']:.2f}, {s['high']:.2f}]" for s in means]
        print(
            f"| {name} | {row['replay_ratio']:.3f} | {row['both_rows_rate']:.3f} | {' | '.join(cells)} | "
            f"{row['motion_lost']} / {row['motion_won']} | {row['psnr']:.1f} | {row['ssim']:.3f} | "
            f"{row['speedup']:.2f}x |"
        )
    document = json.dumps({"clips": clips_each, "split": args.split, "rows": rows})
    if args.output:
        args.output.write_text(document + "\n", encoding="utf-8")
    print(document)


if __name__ == "__main__":
    main()

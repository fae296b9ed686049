"""How much decode time does replay save, of what it could save at most?

The yardstick is the same engine's own dense decode of the same clip, in the same process, interleaved prompt by
prompt; the ceiling is a run in which every MLP from the second frame on is replayed, so that nothing but the MLPs'
own share of the time bounds it. In eager PyTorch a small model's step is mostly overhead outside the MLPs, so the
ceiling is low; a ratio near it says that skipping itself costs little. Medians over prompts are shown.

    python -m benchmarks.replay [--prompts 5] [--model mini] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys

import torch

import fastcar
from fastcar.analysis.evaluate import held_out_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--score", default="input")
    args = parser.parse_args()

    pipe = fastcar.load(args.model, dtype=args.dtype)
    settings = {
        "dense": None,
        "replay 0.5": fastcar.ReplayConfig(target_ratio=0.5, score=args.score, tie_guidance=True),
        "replay 0.8": fastcar.ReplayConfig(target_ratio=0.8, score=args.score, tie_guidance=True),
        "replay 0.8, rows apart": fastcar.ReplayConfig(target_ratio=0.8, score=args.score),
        "all replayed": fastcar.ReplayConfig(threshold=-math.inf, score="random"),
    }
    _, prompts = held_out_prompts(args.prompts)
    pipe(prompts[0], frames=2)
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    decoder: dict[str, list[float]] = {name: [] for name in settings}
    ratios: dict[str, list[float]] = {name: [] for name in settings}
    for number, prompt in enumerate(prompts):
        for name, replay in settings.items():
            stats = pipe(prompt, replay=replay, seed=number).stats
            seconds[name].append(stats.timing.decode)
            decoder[name].append(stats.timing.parts["decoder"])
            ratios[name].append(stats.replay.replay_ratio)
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr)

    def gain(times: dict[str, list[float]], name: str) -> float:
        return statistics.median(d / t for d, t in zip(times["dense"], times[name], strict=True))

    print(f"{args.model}, {args.dtype}, {pipe.engine.name} engine, {torch.get_num_threads()} threads")
    print(f"{'':24}{'ratio':>8}{'decode s':>10}{'speed-up':>10}{'layers s':>10}{'speed-up':>10}")
    rows = {}
    for name in settings:
        rows[name] = {
            "replay_ratio": statistics.mean(ratios[name]),
            "seconds_decode": statistics.median(seconds[name]),
            "speedup": gain(seconds, name),
            "seconds_decoder": statistics.median(decoder[name]),
            "speedup_decoder": gain(decoder, name),
        }
        r = rows[name]
        print(
            f"{name:24}{r['replay_ratio']:8.3f}{r['seconds_decode']:10.2f}{r['speedup']:9.2f}x"
            f"{r['seconds_decoder']:10.2f}{r['speedup_decoder']:9.2f}x"
        )
    print(json.dumps({"threads": torch.get_num_threads(), "prompts": args.prompts, "rows": rows}))


if __name__ == "__main__":
    main()

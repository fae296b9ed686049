"""How much decode time does replay save, of what it could save at most, and how much does the engine?

The yardstick of replay is the same engine's own dense decode of the same clip, in the same process, interleaved prompt
by prompt; the ceiling is a run in which every MLP from the second frame on is replayed, so that nothing but the MLPs'
own share of the time bounds it. In eager PyTorch a small model's step is mostly overhead outside the MLPs, so the
ceiling is low; a ratio near it says that skipping itself costs little. Engines are compared by their dense clips.
Medians over prompts are shown.

    python -m benchmarks.replay [--prompts 5] [--model mini] [--engine native --engine reference] [--dtype float32]
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
from fastcar.decoder import native


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--score", default="input")
    parser.add_argument("--engine", action="append", help="may be given again (default: every engine there is)")
    args = parser.parse_args()
    engines = args.engine or ["reference", *([] if native.unavailable() else ["native"])]

    pipes = {engine: fastcar.load(args.model, dtype=args.dtype, engine=engine) for engine in engines}
    settings = {
        "dense": None,
        "replay 0.5": fastcar.ReplayConfig(target_ratio=0.5, score=args.score, tie_guidance=True),
        "replay 0.8": fastcar.ReplayConfig(target_ratio=0.8, score=args.score, tie_guidance=True),
        "replay 0.8, rows apart": fastcar.ReplayConfig(target_ratio=0.8, score=args.score),
        "all replayed": fastcar.ReplayConfig(threshold=-math.inf, score="random"),
    }
    _, prompts = held_out_prompts(args.prompts)
    for pipe in pipes.values():
        pipe(prompts[0], frames=2)
    runs: dict[tuple[str, str], list[fastcar.ClipStats]] = {(e, name): [] for e in engines for name in settings}
    for number, prompt in enumerate(prompts):
        for name, replay in settings.items():
            for engine, pipe in pipes.items():
                runs[engine, name].append(pipe(prompt, replay=replay, seed=number).stats)
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr)

    def gain(of: list[fastcar.ClipStats], to: list[fastcar.ClipStats], layers: bool = False) -> float:
        """Median of how many times as fast a clip is."""
        seconds = [[s.timing.parts["decoder"] if layers else s.timing.decode for s in each] for each in (of, to)]
        return statistics.median(a / b for a, b in zip(*seconds, strict=True))

    document = {}
    for engine in engines:
        print(f"\n{args.model}, {args.dtype}, {engine} engine, {torch.get_num_threads()} threads")
        print(f"{'':24}{'ratio':>8}{'decode s':>10}{'speed-up':>10}{'layers s':>10}{'speed-up':>10}")
        rows = {}
        for name in settings:
            stats, dense = runs[engine, name], runs[engine, "dense"]
            row = {
                "replay_ratio": statistics.mean(s.replay.replay_ratio for s in stats),
                "both_rows_rate": statistics.mean(s.replay.both_rows_rate for s in stats),
                "decode_seconds": statistics.median(s.timing.decode for s in stats),
                "speedup": gain(dense, stats),
                "layers_seconds": statistics.median(s.timing.parts["decoder"] for s in stats),
                "layers_speedup": gain(dense, stats, layers=True),
                "parts": {p: statistics.median(s.timing.parts[p] for s in stats) for p in stats[0].timing.parts},
            }
            rows[name] = row
            print(
                f"{name:24}{row['replay_ratio']:8.3f}{row['decode_seconds']:10.3f}{row['speedup']:9.2f}x"
                f"{row['layers_seconds']:10.3f}{row['layers_speedup']:9.2f}x"
            )
        document[engine] = rows
    if len(engines) > 1:
        first = engines[0]
        for engine in engines[1:]:
            ratio = gain(runs[first, "dense"], runs[engine, "dense"])
            document[engine]["dense"][f"over_{first}"] = ratio
            print(f"\ndense, {engine} over {first}: {ratio:.2f}x")
    print(json.dumps({"model": args.model, "dtype": args.dtype, "prompts": len(prompts), "engines": document}))


if __name__ == "__main__":
    main()

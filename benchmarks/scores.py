"""Does a score know when an MLP may be replayed?

The yardstick is the rank correlation (Spearman) between a score and how little the MLP's output changed against the
aligned token's, over all tokens from the second frame on of densely generated held-out clips: 1 would let a threshold
skip exactly the least changed MLPs, 0 is no better than chance.

    python -m benchmarks.scores [--model mini] [--clips 24]
"""

from __future__ import annotations

import argparse
import json

import fastcar
from fastcar.analysis.evaluate import held_out_prompts
from fastcar.analysis.scores import score_correlations
from fastcar.models.mini.load import MiniVideoModel


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--clips", type=int, default=24)
    args = parser.parse_args()
    pipe = fastcar.load(args.model, engine="reference")
    assert isinstance(pipe.model, MiniVideoModel)
    _, prompts = held_out_prompts(args.clips)
    clips = pipe.batch(prompts, list(range(args.clips)))
    result = score_correlations(pipe.model, clips)
    layers = len(result["tas"]) - 1
    print(f"{args.model}, {args.clips} clips; Spearman with -(relative change of the MLP's output)")
    print(f"{'score':8}" + "".join(f"layer {n}".rjust(9) for n in range(layers)) + "all".rjust(9))
    for name, values in result.items():
        print(f"{name:8}" + "".join(f"{value:9.2f}" for value in values))
    print(json.dumps({"model": args.model, "clips": args.clips, **result}))


if __name__ == "__main__":
    main()

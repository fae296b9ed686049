"""What does a precision cost? Errors of hidden states, and how far clips go from those in float32.

Hidden states are compared teacher-forced, all decoders being fed the same inputs, so that the error is that of the
arithmetic; relative to float32 (PyTorch). A clip is drawn from its own past: one code drawn otherwise may change all
that follows, so clips are compared by their share of equal codes and by PSNR and SSIM of the frames, and beside each
precision stands what PyTorch's own bfloat16 does. W05 has random weights and inputs, which are harder than a trained
model's.

    python -m benchmarks.precision [--prompts 20] [--model mini]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import numpy as np
import torch
from torch import Tensor

import fastcar
from fastcar.analysis.evaluate import held_out_prompts
from fastcar.bench.decode import table
from fastcar.bench.peers import random_model
from fastcar.bench.shapes import SHAPES
from fastcar.decoder import native
from fastcar.decoder.base import Decoder
from fastcar.decoder.reference import ReferenceDecoder
from fastcar.geometry import Geometry
from fastcar.metrics.image import psnr, ssim

WAYS = [("reference", "bfloat16"), ("native", "float32"), ("native", "bfloat16"), ("native", "int8")]


def decode(decoder: Decoder, inputs: Tensor, geometry: Geometry) -> Tensor:
    """Hidden states [steps + 1, B, H] of given inputs [B, positions, H]."""
    hidden = [decoder.prefill(inputs[:, : geometry.prefix], geometry)]
    hidden += [decoder.step(inputs[:, geometry.prefix + s]) for s in range(geometry.steps)]
    return torch.stack(hidden).float()


def relative(got: Tensor, exact: Tensor) -> float:
    return ((got - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--model", default="mini")
    args = parser.parse_args()
    ways = [way for way in WAYS if way[0] == "reference" or native.unavailable() is None]
    _, prompts = held_out_prompts(args.prompts)
    seeds = list(range(args.prompts))

    exact = fastcar.load(args.model, engine="reference")
    model = exact.model
    clips = exact.batch(prompts, seeds)
    codes = torch.from_numpy(np.stack([clip.codes for clip in clips[:4]])).flatten(1, 2)
    given = model.prompts(prompts[:4], True, model.frames)
    with torch.no_grad():
        later = [model.next_input(given, codes[:, : s + 1]) for s in range(codes.shape[1] - 1)]
    inputs = torch.cat((given.embeds, torch.stack(later, 1)), 1)
    geometry = Geometry(model.frames, codes.shape[1] // model.frames, prefix=given.embeds.shape[1])
    hidden = decode(exact.engine.decoder(), inputs, geometry)

    w05, frames = random_model(SHAPES["W05"], torch.float32), Geometry(3, 16, prefix=16)
    noise = torch.randn(2, frames.positions, w05.config.hidden_size, generator=torch.Generator().manual_seed(3))
    noise_hidden = decode(ReferenceDecoder(w05), noise, frames)

    rows = {}
    for engine, dtype in ways:
        pipe = fastcar.load(args.model, engine=engine, dtype=dtype)
        made = pipe.batch(prompts, seeds)
        half = torch.bfloat16 if (engine, dtype) == ("reference", "bfloat16") else torch.float32
        if engine == "native":
            other: Decoder = native.NativeDecoder(native.NativeWeights.pack(w05, dtype))
        else:
            other = ReferenceDecoder(random_model(SHAPES["W05"], half))
        rows[f"{engine} {dtype}"] = {
            "hidden": relative(decode(pipe.engine.decoder(), inputs.to(half), geometry), hidden),
            "hidden_w05": relative(decode(other, noise.to(half), frames), noise_hidden),
            "codes_equal": statistics.mean(
                float((a.codes == b.codes).mean()) for a, b in zip(made, clips, strict=True)
            ),
            "psnr": statistics.mean(min(60.0, psnr(b.frames, a.frames)) for a, b in zip(made, clips, strict=True)),
            "ssim": statistics.mean(ssim(b.frames, a.frames) for a, b in zip(made, clips, strict=True)),
            "same_clips": sum(np.array_equal(a.codes, b.codes) for a, b in zip(made, clips, strict=True)),
        }
        print(f"{engine} {dtype} done", file=sys.stderr, flush=True)

    header = ["engine", f"hidden states, {args.model}", "W05", "codes equal", "same clips", "PSNR", "SSIM"]
    body = [
        [
            name,
            f"{row['hidden']:.1e}",
            f"{row['hidden_w05']:.1e}",
            f"{row['codes_equal']:.3f}",
            f"{row['same_clips']} of {len(clips)}",
            f"{row['psnr']:.1f}",
            f"{row['ssim']:.3f}",
        ]
        for name, row in rows.items()
    ]
    print(table(header, body))
    print(json.dumps({"model": args.model, "prompts": len(prompts), "rows": rows}))


if __name__ == "__main__":
    main()

"""How fast is one decode step, of what memory allows, and against whom?

A step of decoding reads every weight and every key and value once and computes little with them, so the yardstick is
bytes a second against what all threads of this machine can read, measured in the same run. Peers decode at equal shapes
with equal weights and context, a few steps each in turns, and medians are told; none has an output head. With replay
fewer bytes are read: what is told is the speed-up over the same decoder's dense step, beside that of the bytes. Two
rows that decide apart save a layer's bytes only where both happen to replay.
"""

from __future__ import annotations

import gc
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastcar.bench.peers import PEERS, NativePeer, random_model
from fastcar.bench.shapes import SHAPES, Shape
from fastcar.decoder import native
from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.replay.config import ReplayConfig

__all__ = ["RATIOS", "run", "run_decode", "run_replay", "table"]

RATIOS = (0.0, 0.2, 0.5, 0.8, 0.87, 1.0)

Log = Callable[[str], None]


_TURN, _WARM = 10, 2  # steps of a turn that are timed, and before them


def _all_steps(steps: int) -> int:
    """Steps that a peer makes for so many timed ones."""
    return steps + _WARM * -(-steps // _TURN)


def _in_turns(peers: dict[str, Any], steps: int) -> dict[str, list[float]]:
    """Seconds of each step: every peer a few steps, again and again.

    Not one step each: threads of the peer before (OpenMP's most of all) still spin then, and take a core away from a
    step that is over sooner than they give up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for begin in range(0, steps, _TURN):
        for name, peer in peers.items():
            time.sleep(0.05)
            for n in range(_WARM + min(_TURN, steps - begin)):
                began = time.perf_counter()
                peer.step()
                if n >= _WARM:
                    seconds[name].append(time.perf_counter() - began)
    return seconds


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "ms": 1000 * statistics.median(ordered),
        "ms_p10": 1000 * ordered[len(ordered) // 10],
        "ms_p90": 1000 * ordered[len(ordered) * 9 // 10],
    }


def bandwidth(quick: bool = False) -> float:
    """Bytes a second that this machine reads from memory, by all threads of the native engine or of PyTorch."""
    if native.unavailable() is None:
        return native.read_bandwidth(256 if quick else 1024, 5)
    buffer = torch.zeros((256 if quick else 1024) << 18)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        buffer.sum()
        best = max(best, buffer.numel() * 4 / (time.perf_counter() - began))
    return best


def run_decode(shape: Shape, names: Sequence[str], steps: int, log: Log, quick: bool = False) -> dict[str, Any]:
    """Time dense steps of peers at a shape, two of which together fit into memory beside the model.

    Raises:
        ValueError: an unknown peer.
    """
    if unknown := ", ".join(sorted(set(names) - set(PEERS))):
        raise ValueError(f"unknown peers {unknown}; known are {', '.join(PEERS)}")
    model = random_model(shape)
    limit = bandwidth(quick)
    peers: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            missing, make = PEERS[name]
            if why := missing():
                left_out[name] = why
                continue
            log(f"{shape.name}: {name} is made ready")
            try:
                peers[name] = make(shape, model, _all_steps(steps), Path(folder))
            except Exception as error:  # another version of a peer, or a shape that it cannot take
                left_out[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        log(f"{shape.name}: timing")
        seconds = _in_turns(peers, steps)
    limit = max(limit, bandwidth(quick))
    rows = {}
    for name, peer in peers.items():
        row = _spread(seconds[name])
        must_read = shape.step_bytes(peer.precision)
        row["steps_per_second"] = 1000 / row["ms"]
        row["gigabytes"] = must_read / row["ms"] / 1e6
        row["fraction"] = row["gigabytes"] * 1e9 / limit
        row["ms_per_layer"] = row["ms"] / shape.config.layers
        row["precision"] = peer.precision
        rows[name] = row
    return {
        "shape": shape.name,
        "layers": shape.config.layers,
        "batch": shape.batch,
        "context": shape.context,
        "bandwidth": limit / 1e9,
        "rows": rows,
        "left_out": left_out,
    }


def run_replay(
    shape: Shape, steps: int, log: Log, precision: str = "bfloat16", ratios: Sequence[float] = RATIOS
) -> list[dict[str, Any]]:
    """Time the native decoder at replay ratios against its own dense step, in turns."""
    weights = native.NativeWeights.pack(random_model(shape), precision)
    settings: dict[str, tuple[ReplayConfig | None, AttentionConfig | None]] = {"dense": (None, None)}
    for ratio in ratios:
        # Noise by step and layer decides alike for all rows; inputs drawn anew decide for each row apart.
        if ratio in (0.0, 1.0):  # exactly, from the first step on
            limit = math.inf if ratio == 0 else -math.inf
            settings[f"{ratio:.2f} tied"] = (ReplayConfig(threshold=limit, score="random", tie_guidance=True), None)
        else:
            settings[f"{ratio:.2f} tied"] = (ReplayConfig(target_ratio=ratio, score="random", tie_guidance=True), None)
            settings[f"{ratio:.2f} apart"] = (ReplayConfig(target_ratio=ratio, score="input"), None)
    local = AttentionConfig(window=16, sinks=4)
    settings["window 16"] = (None, local)
    settings["0.87 tied, window 16"] = (ReplayConfig(target_ratio=0.87, score="random", tie_guidance=True), local)
    peers = {}
    for name, (replay, attention) in settings.items():
        log(f"{shape.name}: native, {name}, is made ready")
        peers[name] = NativePeer(shape, weights, _all_steps(steps), replay, attention)
    log(f"{shape.name}: timing")
    seconds = _in_turns(peers, steps)
    dense = statistics.median(seconds["dense"])
    rows = []
    for name, peer in peers.items():
        statistics_of = peer.decoder.trace().statistics()
        both = statistics_of.both_rows_rate if peer.decoder.replay else 0.0
        attended = 20 if settings[name][1] else None
        real = dense / statistics.median(seconds[name])
        ideal = shape.step_bytes(precision) / shape.step_bytes(precision, both, attended)
        rows.append(
            {
                "setting": name,
                **_spread(seconds[name]),
                "replay_ratio": statistics_of.replay_ratio,
                "both_rows_rate": both,
                "speedup": real,
                "ideal": ideal,
                "of_ideal": real / ideal,
            }
        )
    return rows


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers are given as texts."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def run(
    shapes: Sequence[str] = tuple(SHAPES),
    layers: int | None = None,
    batch: int = 2,
    steps: int = 40,
    peers: Sequence[str] = tuple(PEERS),
    quick: bool = False,
    *,
    show: Log,
    log: Log,
) -> dict[str, Any]:
    """Run all of it and return the figures; tables go to ``show``, what is going on to ``log``.

    Raises:
        ValueError: an unknown shape or peer, or a number below one.
    """
    for name, value in {"layers": layers or 1, "batch": batch, "steps": steps}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if unknown := ", ".join(sorted(set(shapes) - set(SHAPES))):
        raise ValueError(f"unknown shapes {unknown}; known are {', '.join(SHAPES)}")
    if quick:
        steps, layers = min(steps, 10), layers or 1
    machine = f"{_cpu()}, {torch.get_num_threads()} threads"
    machine += f", native engine: {native.unavailable() or native.describe()}"
    show(machine)
    document: dict[str, Any] = {"machine": machine, "decode": [], "replay": {}}
    for name in shapes:
        shape = SHAPES[name]
        shape = Shape(name, shape.config, shape.context, batch)
        shape = shape.with_layers(layers) if layers else shape
        result = run_decode(shape, peers, steps, log, quick)
        document["decode"].append(result)
        show(_decode_table(shape, result))
        gc.collect()
        if native.unavailable() is None and any(peer.startswith("native") for peer in peers):
            ratios = (0.0, 0.5, 0.87) if quick else RATIOS
            document["replay"][name] = run_replay(shape, steps, log, ratios=ratios)
            show(_replay_table(document["replay"][name]))
            gc.collect()
    return document


def _decode_table(shape: Shape, result: dict[str, Any]) -> str:
    c = shape.config
    title = (
        f"{shape.name}: {c.layers} layers of {c.hidden_size}, MLP {c.intermediate_size}, batch {shape.batch}, "
        f"context {shape.context}; this machine reads {result['bandwidth']:.1f} GB/s"
    )
    rows = result["rows"]
    ours = [name for name in rows if name.startswith("native")]
    body = [
        [
            name,
            row["precision"],
            f"{row['ms']:.3f} ({row['ms_p10']:.3f} to {row['ms_p90']:.3f})",
            f"{row['ms_per_layer']:.3f}",
            f"{row['gigabytes']:.1f}",
            f"{row['fraction']:.2f}",
            *(f"{row['ms'] / rows[own]['ms']:.2f}x" for own in ours),
        ]
        for name, row in rows.items()
    ]
    header = ["decoder", "weights", "ms a step (p10 to p90)", "ms a layer", "GB/s", "of the limit"]
    parts = [title, table([*header, *(f"over it, {own}" for own in ours)], body)]
    parts += [f"{name} is left out: {why}" for name, why in result["left_out"].items()]
    return "\n" + "\n\n".join(parts)


def _replay_table(rows: list[dict[str, Any]]) -> str:
    body = [
        [
            row["setting"],
            f"{row['replay_ratio']:.2f}",
            f"{row['both_rows_rate']:.2f}",
            f"{row['ms']:.3f}",
            f"{row['speedup']:.2f}x",
            f"{row['ideal']:.2f}x",
            f"{row['of_ideal']:.2f}",
        ]
        for row in rows
    ]
    header = ["native bfloat16, replay", "ratio", "both rows", "ms a step", "speed-up", "by bytes", "of it"]
    return "\n" + table(header, body)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())

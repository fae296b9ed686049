"""The ``fastcar`` command: one thin command per capability.

Progress and logs go to standard error. With ``--json`` the last line of standard output is one JSON document.
A wrong input ends in one line that says what is wrong and what to do, with exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from fastcar.decoder.kv_cache import AttentionConfig
    from fastcar.pipeline import Pipeline
    from fastcar.replay import ReplayConfig

__all__ = ["main"]


# options that change what is generated, beside prompt and seed
_REPLAY = ("replay", "threshold", "score", "max_age", "exclude_layers", "tie_guidance")
_SAMPLING = ("frames", "guidance", "temperature", "top_k", "top_p")
_ATTENTION = ("window", "sinks", "no_evict", "window_positions")
_GENERATION = _REPLAY + _ATTENTION + _SAMPLING


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0, 1 where a check failed, 2 for a wrong input."""
    try:
        args = _build_parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
        result = args.run(args)
        if args.json:
            print(json.dumps(result))
        return 1 if isinstance(result, dict) and result.get("pass") is False else 0
    except KeyboardInterrupt:
        print("fastcar: interrupted; nothing half-written is left", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ImportError) as error:
        print(f"fastcar {args.command}: error: {error}", file=sys.stderr)
        return 2


def _joined(argv: Sequence[str]) -> list[str]:
    """``--threshold -8`` as ``--threshold=-8``: argparse takes values like ``-inf`` or ``-8,-4`` for options."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] == "--threshold" and re.match(r"-(\d|\.|inf)", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _build_parser() -> argparse.ArgumentParser:
    from fastcar import __version__

    parser = _Parser(prog="fastcar", description="Fast auto-regressive video generation with cache attentive replay.")
    parser.add_argument("--version", action="version", version=f"fastcar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], Any], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print one JSON document as the last line")
        return sub

    sub = command("generate", _generate, "make a clip from a prompt")
    sub.add_argument("prompt")
    _add_model(sub)
    _add_replay(sub)
    _add_attention(sub)
    _add_sampling(sub)
    sub.add_argument("-n", "--count", type=int, default=1, help="clips, with seeds from --seed on (default 1)")
    sub.add_argument(
        "-o", "--output", type=Path, help=".mp4, .gif or .png (contact sheet); default: named after prompt and settings"
    )
    sub.add_argument("--trace", type=Path, metavar="FILE.npz", help="also write every replay decision")

    sub = command("compare", _compare, "make a clip densely and with replay, and compare speed and frames")
    sub.add_argument("prompt")
    _add_model(sub)
    _add_replay(sub, without="--replay 0.5 is taken")
    _add_attention(sub)
    _add_sampling(sub)
    sub.add_argument("-o", "--output", type=Path, default=Path("compare"), help="folder for clips and sheet")
    sub.add_argument("--rounds", type=int, default=3, help="how often each side is timed, in turns (default 3)")
    sub.add_argument("--no-ceiling", action="store_true", help="do not measure the speed with every MLP replayed")

    sub = command("evaluate", _evaluate, "measure how well clips show what held-out prompts say")
    sub.add_argument("what", choices=["world"], help="world: the captioned world the mini model is trained on")
    _add_model(sub)
    _add_replay(sub)
    _add_attention(sub)
    _add_sampling(sub)
    sub.add_argument("--prompts", type=int, default=200, help="held-out prompts (default 200)")
    sub.add_argument("--split", choices=["validation", "test"], default="test", help="which held-out prompts")
    sub.add_argument("--objects", type=int, choices=[1, 2], default=1, help="objects in a scene")
    sub.add_argument("--batch", type=int, default=25, help="clips generated together")
    sub.add_argument("--details", action="store_true", help="also print every colour, shape and motion apart")
    sub.add_argument("--frozen", action="store_true", help="repeat each clip's first frame (a control)")
    sub.add_argument("--reconstructed", action="store_true", help="judge rendered truth through the codec instead")
    sub.add_argument("--rendered", action="store_true", help="judge rendered truth instead: measures the measuring")

    sub = command("verify", _verify, "replay recorded traces of the official code on a VILA-U checkpoint, and compare")
    sub.add_argument("checkpoint", help="a VILA-U checkpoint's folder")
    sub.add_argument("traces", type=Path, help="a folder of traces: pairs of .json and .safetensors")
    sub.add_argument("--threads", type=int, help="CPU threads (default: as PyTorch chooses)")

    sub = command("bench", _bench, "time decode steps against other decoders and the memory's bandwidth")
    sub.add_argument("--shape", action="append", help="W7, W05 or WS; may be given again (default all)")
    sub.add_argument("--layers", type=int, help="layers instead of the shape's own")
    sub.add_argument("--batch", type=int, default=2, help="rows; two are a guidance pair (default 2)")
    sub.add_argument("--steps", type=int, default=40, help="steps timed of each decoder (default 40)")
    sub.add_argument("--peers", help="decoders, separated by commas (default all that can run here)")
    sub.add_argument("--threads", type=int, help="CPU threads (default: all)")
    sub.add_argument("--quick", action="store_true", help="one layer and a few steps: does it work?")

    sub = command("info", _info, "show version, engines, threads, dtypes and models")

    from fastcar.training.cli import add_train

    add_train(command("train", lambda args: args.train(args), "train the mini model's parts, or your own"))
    return parser


def _add_model(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("model")
    group.add_argument("--model", default="mini", help="a shipped model's name or a checkpoint folder (default mini)")
    group.add_argument("--dtype", default="float32", help="float32, bfloat16 or int8 (default float32)")
    group.add_argument(
        "--engine",
        default="auto",
        help="native, reference or auto: native if it is available (default auto)",
    )
    group.add_argument("--threads", type=int, help="CPU threads (default: as PyTorch chooses)")


def _add_sampling(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("sampling", "defaults are the model's own")
    group.add_argument("--frames", type=int)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--guidance", type=float, help="classifier-free guidance scale; 1 turns it off")
    group.add_argument("--temperature", type=float, help="0 takes the most likely codes")
    group.add_argument("--top-k", type=int, help="0 keeps all")
    group.add_argument("--top-p", type=float, help="1 keeps all")


def _add_replay(sub: argparse.ArgumentParser, without: str = "every MLP is computed") -> None:
    group = sub.add_argument_group("replay", f"without --replay or --threshold {without}")
    group.add_argument("--replay", type=float, metavar="R", help="share of MLPs to replay, 0..1 (steered to be met)")
    group.add_argument(
        "--threshold", metavar="T[,T...]", help="replay at this score; one, or one per layer ('none': computes)"
    )
    group.add_argument("--score", help="input, tas, tas-official or random")
    group.add_argument("--max-age", type=int, help="frames in a row one output may be replayed; 0: no limit")
    group.add_argument("--exclude-layers", metavar="L[,L...]", help="layers that always compute")
    group.add_argument("--tie-guidance", action=argparse.BooleanOptionalAction, help="both guidance rows or neither")


def _add_attention(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group("sparse attention", "without --window every token before is attended to")
    group.add_argument("--window", metavar="W", help="latest tokens attended to: a number, or '2 frames'")
    group.add_argument("--sinks", metavar="S", help="first tokens always attended to: a number or 'prompt' (default 4)")
    group.add_argument(
        "--no-evict", action="store_true", default=None, help="mask instead of forgetting (saves nothing)"
    )
    group.add_argument(
        "--window-positions",
        choices=["absolute", "window"],
        help="count rotary positions from the start or in the window",
    )


def _attention(args: argparse.Namespace) -> AttentionConfig | None:
    """What the attention options ask for; None if none is given."""
    from fastcar.decoder.kv_cache import AttentionConfig

    said = {name: getattr(args, name) for name in _ATTENTION if getattr(args, name) is not None}
    if not said:
        return None
    if args.window is None:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in said)
        raise ValueError(f"{options}: only with --window; add it")

    def number(text: str) -> int | str:
        return int(text) if text.isdecimal() else text

    return AttentionConfig(
        window=number(args.window),
        sinks=number(args.sinks or "4"),  # type: ignore[arg-type]
        evict=not args.no_evict,
        positions=args.window_positions or "absolute",
    )


def _replay_config(args: argparse.Namespace, pipe: Pipeline) -> ReplayConfig | None:
    """What the replay options ask for: the model's recommended setting, changed by what is said."""
    from fastcar.replay import ReplayConfig

    said: dict[str, Any] = {}
    if args.score is not None:
        said["score"] = args.score
    if args.max_age is not None:
        said["max_age"] = args.max_age or None
    if args.exclude_layers is not None:
        said["exclude_layers"] = _list(args.exclude_layers, int, "--exclude-layers")
    if args.tie_guidance is not None:
        said["tie_guidance"] = args.tie_guidance
    if args.replay is not None and args.threshold is not None:
        raise ValueError("give --replay or --threshold, not both")
    if args.replay is not None and not 0 <= args.replay <= 1:
        raise ValueError(f"--replay takes a share in 0..1, got {args.replay}; 0.5 replays half of the MLPs")
    if args.replay is not None:
        return replaced(pipe.model.recommended_replay(args.replay), **said)
    if args.threshold is not None:
        values = _list(args.threshold, lambda v: None if v == "none" else float(v), "--threshold")
        if values == [None]:
            raise ValueError("--threshold none replays nothing; leave it out, or give one value per layer")
        return ReplayConfig(threshold=values[0] if len(values) == 1 else values, **said)
    if said:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in said)
        raise ValueError(f"{options}: only with --replay or --threshold; add one of them")
    return None


def _list(text: str, convert: Callable[[str], Any], option: str) -> list[Any]:
    try:
        return [convert(part.strip()) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by commas, got {text!r}") from None


def _set_threads(args: argparse.Namespace) -> None:
    import torch

    from fastcar.decoder import native

    if args.threads is not None:
        if not 1 <= args.threads <= 1024:
            raise ValueError(f"--threads must lie in 1..1024, got {args.threads}")
        torch.set_num_threads(args.threads)
        if native.unavailable() is None:
            native.set_threads(args.threads)


def _load(args: argparse.Namespace) -> Pipeline:
    import fastcar

    _set_threads(args)
    return fastcar.load(args.model, dtype=args.dtype, engine=args.engine)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in _SAMPLING}


def _bar(total: int, what: str, unit: str = "frame") -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, file=sys.stderr, leave=False)


def _warn(pipe: Pipeline, prompt: str) -> None:
    for warning in pipe.model.check_prompt(prompt):
        print(f"warning: {warning}", file=sys.stderr)


def _default_name(args: argparse.Namespace, seed: int) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", args.prompt.lower()).strip("-")[:60].strip("-")
    parts = [words or "clip", f"seed{seed}"]
    parts += [f"{name}{getattr(args, name)}" for name in _GENERATION if getattr(args, name) is not None]
    defaults = {"model": "mini", "dtype": "float32", "engine": "auto"}
    parts += [Path(getattr(args, name)).name for name, usual in defaults.items() if getattr(args, name) != usual]
    return re.sub(r"[^\w.=-]+", "-", "_".join(parts))[:200] + ".mp4"


def _generate(args: argparse.Namespace) -> dict[str, Any]:
    from fastcar.video import check_output

    if args.count < 1:
        raise ValueError(f"--count must be at least 1, got {args.count}")
    seeds = [args.seed + i for i in range(args.count)]
    outputs = [args.output or Path(_default_name(args, seed)) for seed in seeds]
    if args.output and args.count > 1:
        outputs = [args.output.with_name(f"{args.output.stem}-{i}{args.output.suffix}") for i in range(args.count)]
    for output in outputs:
        check_output(output)
    if args.trace:
        check_output(args.trace, extensions=(".npz",))
    attention = _attention(args)
    pipe = _load(args)
    _warn(pipe, args.prompt)
    replay = _replay_config(args, pipe)
    with _bar(args.frames or pipe.model.frames, "generating") as bar:
        clips = pipe.batch(
            [args.prompt] * args.count,
            seeds,
            replay=replay,
            attention=attention,
            progress=lambda done, total: bar.update(),
            **_sampling(args),
        )
    documents = []
    for i, (clip, output) in enumerate(zip(clips, outputs, strict=True)):
        clip.save(output)
        if args.trace:
            clip.trace.save(args.trace if args.count == 1 else args.trace.with_stem(f"{args.trace.stem}-{i}"))
        print(f"{output}\n{clip.stats}")
        documents.append({"output": str(output), **clip.stats.to_dict()})
    return documents[0] if args.count == 1 else {"clips": documents}


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    from fastcar.analysis.compare import compare
    from fastcar.video import check_output

    if args.replay is None and args.threshold is None:
        args.replay = 0.5
    sheet = args.output / "compare.png"
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"{args.output} is a file; --output must name a folder")
    attention = _attention(args)
    pipe = _load(args)
    _warn(pipe, args.prompt)
    config = _replay_config(args, pipe)
    assert config is not None
    frames = args.frames or pipe.model.frames
    existing = next(folder for folder in (args.output, *args.output.absolute().parents) if folder.exists())
    for name in ("dense.mp4", "replay.mp4", sheet.name):
        check_output(existing / name)
    with _bar(frames * (2 if args.no_ceiling else 3) * max(1, args.rounds), "generating") as bar:

        def progress(name: str) -> Callable[[int, int], None]:
            def update(done: int, total: int) -> None:
                bar.set_description(name)
                bar.update()

            return update

        result = compare(
            pipe,
            args.prompt,
            config,
            attention=attention,
            ceiling=not args.no_ceiling,
            rounds=args.rounds,
            seed=args.seed,
            progress=progress,
            **_sampling(args),
        )
    args.output.mkdir(parents=True, exist_ok=True)
    outputs = {"dense": args.output / "dense.mp4", "replay": args.output / "replay.mp4"}
    result.dense.save(outputs["dense"])
    result.replay.save(outputs["replay"])
    result.save_sheet(sheet)
    print(result)
    print(f"clips and sheet: {args.output}/dense.mp4, replay.mp4, compare.png")
    document = result.to_dict()
    for name, output in outputs.items():
        document[name] = {"output": str(output), **document[name]}  # type: ignore[dict-item]
    return {**document, "sheet": str(sheet)}


def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from fastcar.analysis.evaluate import evaluate_world

    if args.rendered or args.reconstructed:
        useless = [f"--{name.replace('_', '-')}" for name in _GENERATION if getattr(args, name) is not None]
        if args.rendered and args.model != "mini":
            useless.append("--model")
        if useless or (args.rendered and args.reconstructed):
            raise ValueError(
                f"--{'rendered' if args.rendered else 'reconstructed'} generates nothing, so it does not go with "
                f"{', '.join(useless) or '--reconstructed'}"
            )
    attention = _attention(args)
    pipe = None if args.rendered else _load(args)
    config = _replay_config(args, pipe) if pipe else None
    sampling = {k: v for k, v in _sampling(args).items() if v is not None}
    with _bar(args.prompts, "evaluating", "clip") as bar:
        result = evaluate_world(
            pipe,
            args.prompts,
            args.seed,
            replay=config,
            attention=attention,
            split=args.split,
            objects=args.objects,
            batch=args.batch,
            frozen=args.frozen,
            reconstructed=args.reconstructed,
            progress=bar.update,
            **sampling,
        )
    summary = result.summary()
    print(f"{args.prompts} {args.split} prompts, seed {args.seed}, replay ratio {result.replay_ratio:.3f}")
    if result.reconstruction_psnr is not None:
        print(f"reconstruction of the rendered scenes {result.reconstruction_psnr:.2f} dB")
    for name, s in summary.items():
        print(f"{name:18} {s['mean']:.3f}  [{s['low']:.3f}, {s['high']:.3f}]")
    if args.details:
        for name, counts in result.details().items():
            print(f"{name:18} " + ", ".join(f"{value} {right}/{of}" for value, (right, of) in counts.items()))
    about = {"prompts": args.prompts, "split": args.split, "seed": args.seed, "replay_ratio": result.replay_ratio}
    return {**about, "reconstruction_psnr": result.reconstruction_psnr, **summary, "details": result.details()}


def _verify(args: argparse.Namespace) -> dict[str, Any]:
    import fastcar
    from fastcar.analysis.verify import verify

    _set_threads(args)
    pipe = fastcar.load(args.checkpoint, engine="reference")
    reports = verify(pipe, args.traces, progress=lambda report: print(report, flush=True))
    failed = [report.file for report in reports if not report.passed]
    print(f"{len(reports)} traces: {'all PASS' if not failed else 'FAIL in ' + ', '.join(failed)}")
    return {"pass": not failed, "files": [report.to_dict() for report in reports]}


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    from fastcar.bench import decode

    _set_threads(args)
    more = {"peers": args.peers.split(",")} if args.peers else {}
    shapes = args.shape or list(decode.SHAPES)
    return decode.run(shapes, args.layers, args.batch, args.steps, quick=args.quick, show=print, log=_tell, **more)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _info(args: argparse.Namespace) -> dict[str, Any]:
    import platform

    import torch

    from fastcar import __version__
    from fastcar.decoder import native
    from fastcar.models.registry import SHIPPED
    from fastcar.pipeline import DTYPES

    missing = native.unavailable()
    engines = {
        "native": f"not available: {missing}" if missing else native.describe(),
        "reference": "PyTorch, the specification",
    }
    about = {
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "engines": engines,
        "default_engine": "reference" if missing else "native",
        "dtypes": list(DTYPES),
        "models": {name: _model_size(path) for name, path in SHIPPED.items()},
    }
    for name, value in about.items():
        shown = ", ".join(f"{k} ({v})" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name.replace('_', ' '):15} {', '.join(shown) if isinstance(shown, list) else shown}")
    return about


def _model_size(folder: Path) -> str:
    if not folder.is_dir():
        return "missing from this installation"
    return f"{sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 1e6:.1f} MB"

"""``fastcar train``: the codec, then the decoder, then a checkpoint folder that ``fastcar.load`` reads.

All of a run lies in one folder: ``tokenizer.safetensors``, ``codes/``, and one checkpoint for each decoder run.
Every command goes on from what the folder holds.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcar.training import world
from fastcar.training.settings import DecoderTraining, TokenizerTraining

if TYPE_CHECKING:
    from torch import Tensor

    from fastcar.models.mini.codec import MiniCodec
    from fastcar.training.clips import ClipSource

__all__ = ["add_train"]


def add_train(parser: argparse.ArgumentParser) -> None:
    """Give the ``train`` command its sub-commands."""
    commands = parser.add_subparsers(dest="part", required=True, metavar="PART")

    def command(name: str, train: Callable[[argparse.Namespace], Any], help: str) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(train=train)
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document last")
        sub.add_argument(
            "--run-dir", type=Path, default=Path("runs/mini"), help="folder of the run (default runs/mini)"
        )
        return sub

    def settings(sub: argparse.ArgumentParser, of: type) -> None:
        sub.set_defaults(settings=of)
        meanings = _meanings(of)
        for field in fields(of):
            kind: Any = type(field.default)
            option = f"--{field.name.replace('_', '-')}"
            if kind is bool:
                sub.add_argument(option, action="store_true", default=argparse.SUPPRESS, help=meanings[field.name])
                continue
            default = ",".join(map(str, field.default)) if kind is tuple else field.default
            sub.add_argument(
                option,
                type=_floats if field.name == "depth_weights" else _words_of if kind is tuple else kind,
                default=argparse.SUPPRESS,
                help=f"{meanings[field.name]} (default {default if default != '' else 'none'})".replace("%", "%%"),
            )
        sub.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
        sub.add_argument("--save-every", type=int, default=250, help="steps between checkpoints (default 250)")
        group = sub.add_argument_group("clips", "without --folder, clips of the rendered world")
        group.add_argument("--folder", type=Path, help="your own clips: videos and captions.csv or captions.jsonl")
        group.add_argument("--size", type=int, help="side of a frame, a multiple of 8 (default 64, or the tokenizer's)")
        group.add_argument("--frames", type=int, default=world.FRAMES, help="frames of a clip (default 8)")

    sub = command("tokenizer", _tokenizer, "Train the codec: frames to codes and back.")
    settings(sub, TokenizerTraining)
    sub.add_argument("--name", default="tokenizer", help="of this codec run in the folder (default tokenizer)")
    sub.add_argument("--start-from", help="begin with the codec of another run of the folder")
    sub = command("decoder", _decoder, "Train the decoder and its depth head on the codec's codes.")
    settings(sub, DecoderTraining)
    sub.add_argument("--name", default="decoder", help="of this decoder run in the folder (default decoder)")
    sub.add_argument("--start-from", help="begin with the weights of another decoder run, or of a checkpoint folder")
    sub.add_argument("--tokenizer", default="tokenizer", help="the codec run whose codes it learns, or a folder")
    sub.add_argument("--encode", type=int, help="clips of the rendered world to encode (default 12000)")
    sub.add_argument("--encode-firsts", type=int, help="further first frames of it to encode (default 40000)")
    sub.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    sub = command("export", _export, "Write codec and decoder as a checkpoint folder for fastcar.load.")
    sub.add_argument("--name", default="decoder", help="of the decoder run (default decoder)")
    sub.add_argument("--tokenizer", default="tokenizer", help="the codec run (default tokenizer), or a folder")
    sub.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    sub.add_argument(
        "--average-with",
        help="another decoder run or a folder, one of which went on from the other: write the mean of both",
    )
    sub.add_argument("--model-name", help="what the model is called (default: as the folder)")
    sub.add_argument("--guidance", type=float, default=3.0, help="recommended guidance scale")
    sub.add_argument("--temperature", type=float, default=0.4, help="recommended temperature")
    sub.add_argument("--top-k", type=int, default=20, help="recommended top-k")
    sub.add_argument("--max-age", type=int, help="recommended limit of replays in a row; 0: no limit")
    sub.add_argument("--tie-guidance", action="store_true", help="recommend that guidance pairs replay together")


def _meanings(of: type) -> dict[str, str]:
    """What the docstring of a settings class says of each attribute."""
    text = inspect.getdoc(of) or ""
    meanings = {}
    for names, meaning in re.findall(r"^    ([a-z_, ]+): (.+(?:\n {8}.+)*)", text, re.MULTILINE):
        for name in names.split(", "):
            meanings[name] = " ".join(meaning.replace("``", "").split()).rstrip(".")
    return meanings


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _words_of(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _chosen(args: argparse.Namespace) -> Any:
    return args.settings(**{f.name: getattr(args, f.name) for f in fields(args.settings) if hasattr(args, f.name)})


def _device(name: str) -> str:
    """A device's name, checked by putting something there."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        told = str(error).splitlines()[0]
        raise ValueError(
            f"--device {name} cannot be used here ({told}); use cpu, or cuda where there is a GPU"
        ) from error
    return name


def _sources(args: argparse.Namespace, size: int) -> tuple[ClipSource, ClipSource]:
    from fastcar.models.mini.model import MiniConfig
    from fastcar.models.mini.text import WordTokenizer
    from fastcar.training.clips import FolderClips, WorldClips

    if args.folder:
        sources = FolderClips.split(args.folder, size, args.frames)
        reader = WordTokenizer((), MiniConfig(()).max_words)
        for source in sources:
            source.check_captions(reader.check)
        return sources
    if size != world.SIDE or args.frames != world.FRAMES:
        raise ValueError(f"the rendered world has {world.FRAMES} frames of {world.SIDE} px; --folder takes other sizes")
    return WorldClips("train"), WorldClips("validation")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tokenizer(args: argparse.Namespace) -> dict[str, Any]:
    from fastcar.models.mini.codec import CodecConfig
    from fastcar.training.tokenizer import train_tokenizer

    training, device = _chosen(args), _device(args.device)
    config = CodecConfig(size=args.size or world.SIDE)
    train, held_out = _sources(args, config.size)
    output = args.run_dir / f"{args.name}.safetensors"
    _, quality = train_tokenizer(
        config,
        training,
        train,
        held_out,
        output,
        start_from=_existing(args.run_dir / f"{args.start_from}.safetensors") if args.start_from else None,
        device=device,
        save_every=args.save_every,
        log=_log,
    )
    print(f"{output}: {quality:.2f} dB on held-out frames")
    return {"output": str(output), "psnr": quality}


def _codec(run_dir: Path, name: str, device: str) -> MiniCodec:
    import torch

    from fastcar.models.mini.codec import CodecConfig, MiniCodec
    from fastcar.models.mini.load import load
    from fastcar.training.checkpoint import load_checkpoint

    if Path(name).is_dir():
        return load(Path(name)).codec.to(device, memory_format=torch.channels_last)
    path = run_dir / f"{name}.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} is missing; run 'fastcar train tokenizer --run-dir {run_dir}' first")
    state, header = load_checkpoint(path, "tokenizer")
    codec = MiniCodec(CodecConfig(**header["config"]))
    codec.load_state_dict(state["codec"])
    return codec.eval().to(device, memory_format=torch.channels_last)


def _decoder(args: argparse.Namespace) -> dict[str, Any]:
    from fastcar.models.mini.model import MiniConfig
    from fastcar.models.mini.text import WordTokenizer
    from fastcar.training.decoder import encode_clips, train_decoder

    training, device = _chosen(args), _device(args.device)
    codec = _codec(args.run_dir, args.tokenizer, device)
    size = codec.config.size
    if args.size not in (None, size):
        raise ValueError(f"--size {args.size}, but the tokenizer was trained on frames of {size} px; leave --size out")
    train, held_out = _sources(args, size)
    config = MiniConfig(words=tuple(_words(args, train)), frames=args.frames, codec=codec.config)
    tokenizer = WordTokenizer(config.words, config.max_words)
    codes = args.run_dir / "codes"
    clips, firsts = (12000 if args.encode is None else args.encode), (args.encode_firsts or 40000)
    if args.folder:
        if args.encode is not None or args.encode_firsts is not None:
            raise ValueError("--encode and --encode-firsts go with the rendered world; of a --folder all is encoded")
        clips = firsts = len(train)
    start = 0 if args.folder else 500_000  # first frames of other clips than those shown whole
    data = encode_clips(codec, tokenizer, train, 0, clips, codes / "clips.safetensors")
    first_frames = encode_clips(codec, tokenizer, train, start, firsts, codes / "firsts.safetensors", first_frames=True)
    test = encode_clips(codec, tokenizer, held_out, 0, min(64, len(held_out)), codes / "validation.safetensors")
    output = args.run_dir / f"{args.name}.safetensors"
    train_decoder(
        config,
        training,
        data,
        first_frames,
        test,
        output,
        start_from=_weights(args.run_dir, args.start_from, "--start-from") if args.start_from else None,
        device=device,
        compile=not args.no_compile,
        save_every=args.save_every,
        log=_log,
    )
    print(output)
    return {"output": str(output)}


def _weights(run_dir: Path, name: str, option: str) -> dict[str, Tensor]:
    """The decoder's weights that an option names, by run or by folder."""
    from fastcar.models.mini.load import load
    from fastcar.training.checkpoint import load_checkpoint

    if Path(name).is_dir():
        return load(Path(name)).model.state_dict()
    path = _existing(run_dir / f"{name}.safetensors", option)
    weights: dict[str, Tensor] = load_checkpoint(path, "decoder")[0]["model"]
    return weights


def _existing(path: Path, option: str = "--start-from") -> Path:
    if not path.is_file():
        raise ValueError(f"{option} names {path}, which does not exist")
    return path


def _words(args: argparse.Namespace, train: ClipSource) -> list[str]:
    from fastcar.models.mini.text import WordTokenizer

    if not args.folder:
        return world.vocabulary()
    return sorted({word for caption in train.captions for word in WordTokenizer.split(caption)})  # type: ignore[attr-defined]


def _export(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from fastcar.models.mini.load import config_from_dict, save
    from fastcar.models.mini.model import MiniModel
    from fastcar.replay.config import ReplayConfig
    from fastcar.sampling import SamplingConfig
    from fastcar.training.checkpoint import load_checkpoint, load_weights
    from fastcar.training.decoder import codebook_digest

    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"{args.output} is a file; --output must name a folder")
    codec = _codec(args.run_dir, args.tokenizer, "cpu")
    path = args.run_dir / f"{args.name}.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} is missing; run 'fastcar train decoder --run-dir {args.run_dir}' first")
    state, header = load_checkpoint(path, "decoder")
    if header.get("codec", codebook_digest(codec)) != codebook_digest(codec):
        raise ValueError(f"{path} was trained on the codes of another tokenizer than {args.tokenizer!r}; name that one")
    config = config_from_dict(header["config"])
    model = MiniModel(config)
    weights = state["model"]
    if args.average_with:
        load_weights(model, _weights(args.run_dir, args.average_with, "--average-with"), "the weights to average with")
        # both as they would be written alone
        written = [{k: v.to(torch.bfloat16).float() for k, v in each.items()} for each in (weights, model.state_dict())]
        weights = {k: (v + written[1][k]) / 2 for k, v in written[0].items()}
    model.load_state_dict(weights)
    sampling = {"guidance": args.guidance, "temperature": args.temperature, "top_k": args.top_k}
    SamplingConfig(**sampling)
    replay = {"score": "input", "max_age": args.max_age or None, "tie_guidance": args.tie_guidance}
    ReplayConfig(target_ratio=0.5, **replay)
    about = {
        "name": args.model_name or args.output.name,
        "sampling": sampling,
        "replay": replay,
        "steps": header["step"],
    }
    save(args.output, config, model, codec, about, torch.bfloat16)
    print(args.output)
    return {"output": str(args.output), "steps": header["step"]}

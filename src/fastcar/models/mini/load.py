"""The mini family as a :class:`VideoModel`: read from and written to a folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from fastcar.decoder import native
from fastcar.decoder.config import DecoderConfig
from fastcar.decoder.llama import LlamaLayer
from fastcar.geometry import Geometry
from fastcar.models.base import Choose, DepthHead, Prompts
from fastcar.models.mini.codec import CodecConfig, MiniCodec
from fastcar.models.mini.model import MiniConfig, MiniDepthHead, MiniModel
from fastcar.models.mini.text import WordTokenizer
from fastcar.replay.config import ReplayConfig
from fastcar.sampling import SamplingConfig

__all__ = ["MiniVideoModel", "config_from_dict", "load", "save"]

WEIGHTS = "model.safetensors"


class _Sampler:
    """The depth head, one depth after another."""

    def __init__(self, head: MiniDepthHead) -> None:
        self.head = head

    @torch.no_grad()
    def sample(self, hidden: Tensor, choose: Choose) -> Tensor:
        codes = hidden.new_empty(len(hidden), 0, dtype=torch.long)
        for depth in range(self.head.config.codec.depth):
            chosen = choose(depth, self.head(hidden, codes)[:, -1])
            codes = torch.cat((codes, chosen[:, None]), 1)
        return codes


class MiniVideoModel:
    """FastCar's own small text-to-video model. See :class:`fastcar.models.base.VideoModel`."""

    family = "fastcar-mini"
    fps = 8

    def __init__(self, config: MiniConfig, model: MiniModel, codec: MiniCodec, about: dict[str, Any]) -> None:
        self.config, self.model, self.codec = config, model.eval(), codec.eval()
        self.name = str(about.get("name", "mini"))
        self.decoder = model.decoder
        self.depth_head = _Sampler(model.depth_head)
        self.depth, self.codebook_size = config.codec.depth, config.codec.codebook_size
        self.frames = config.frames
        self.tokenizer = WordTokenizer(config.words, config.max_words)
        self.sampling = SamplingConfig(**about.get("sampling", {}))
        self.calibration: dict[str, Any] = about.get("replay", {})
        self.recommended_replay(0.5)  # a calibration that says nonsense is told now

    def geometry(self, frames: int) -> Geometry:
        return Geometry(frames, self.config.codec.tokens_per_frame, prefix=self.config.max_words)

    def check_prompt(self, prompt: str) -> list[str]:
        try:
            self.tokenizer.check(prompt)
        except ValueError as error:
            raise ValueError(f"the prompt {error}") from error
        strange = self.tokenizer.unknown(prompt)
        warnings = [
            f"{self.name} does not know the word {word!r}" + (f"; nearest known: {', '.join(near)}" if near else "")
            for word, near in strange.items()
        ]
        if not all(strange.values()):  # no word near it says what could be meant: show all there are
            words = self.config.words
            more = f" and {len(words) - 100} more" if len(words) > 100 else ""
            warnings.append(f"{self.name} knows the words {' '.join(words[:100])}{more}")
        return warnings

    @torch.no_grad()
    def prompts(self, prompts: Sequence[str], guided: bool, frames: int) -> Prompts:
        words = torch.stack([self.tokenizer.encode(prompt) for prompt in prompts])
        if guided:
            words = torch.cat((words, self.tokenizer.encode("").expand_as(words)))
        words = words.to(self.codec.codebook.device)
        embedding = self.model.embedding
        caption = embedding.caption_mean(words)
        embeds = embedding.prompt(words)
        nothing = embeds.new_zeros(len(words), 1, self.config.code_dim)
        embeds[:, -1:] += embedding.targets(nothing, 0, 1, caption)
        return Prompts(embeds, None, caption)

    @torch.no_grad()
    def next_input(self, prompts: Prompts, codes: Tensor) -> Tensor:
        return self.model.embedding.target(codes, prompts.state)

    def native_depth_head(self, precision: str) -> Callable[[], DepthHead]:
        head, d = self.model.depth_head, self.config.depth_decoder
        return native.NativeDepthHead.pack(
            heads=d.heads,
            depths=head.depths,
            tables=list(head.codes),
            hidden=d.hidden_size,
            hidden_in=native.pack(head.hidden.weight, precision=precision),
            blocks=[native.llama_block(cast("LlamaLayer", layer), d.rms_norm_eps, precision) for layer in head.layers],
            norm=native.norm(head.norm.weight, d.rms_norm_eps),
            classifiers=[native.pack(weight, precision=precision) for weight in head.classifier],
            carry=True,
            rope_theta=d.rope_theta,
        )

    def recommended_replay(self, target_ratio: float) -> ReplayConfig:
        return ReplayConfig(target_ratio=target_ratio, **self.calibration)


def config_from_dict(values: dict[str, Any]) -> MiniConfig:
    """Undo ``dataclasses.asdict`` of a :class:`MiniConfig`."""
    values = dict(values)
    values["words"] = tuple(values["words"])
    if not all(isinstance(word, str) for word in values["words"]):
        raise TypeError("words must be texts")
    if not all(isinstance(values[name], int) for name in ("frames", "max_words", "code_dim") if name in values):
        raise TypeError("frames, max_words and code_dim must be whole numbers")
    values["codec"] = CodecConfig(**values["codec"])
    values["decoder"] = DecoderConfig(**values["decoder"])
    return MiniConfig(**values)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else hashlib.sha256(file.read()).hexdigest()
        )


def load(folder: Path, dtype: torch.dtype = torch.float32) -> MiniVideoModel:
    """Read a mini checkpoint: ``config.json`` and ``model.safetensors``, whose SHA-256 the config holds.

    Raises:
        ValueError: a file is missing or damaged, or config and weights do not fit.
    """
    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(f"{path} is missing; the checkpoint is not whole")
    digest = _digest(path)
    if digest != about.get("sha256"):
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {digest}, but config.json says {about.get('sha256')}; fetch it again"
        )
    try:
        config = config_from_dict(about["model"])
        tensors = load_file(path)
        with torch.device("meta"):
            model, codec = MiniModel(config), MiniCodec(config.codec)
        model, codec = model.to_empty(device="cpu"), codec.to_empty(device="cpu")
        model.embedding.place_neighbours()
        for module, prefix in ((model, "model."), (codec, "codec.")):
            part = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            module.load_state_dict(part)
        return MiniVideoModel(config, model.to(dtype), codec.to(dtype), about)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"{folder}: config and weights do not fit ({told[:300]})") from error


def save(
    folder: Path, config: MiniConfig, model: MiniModel, codec: MiniCodec, about: dict[str, Any], dtype: torch.dtype
) -> None:
    """Write a checkpoint; ``about`` holds ``name``, ``sampling``, ``replay`` and whatever else is worth knowing."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    tensors |= {f"codec.{k}": v for k, v in codec.state_dict().items()}
    beside, config_beside = folder / f".{WEIGHTS}.{os.getpid()}", folder / f".config.json.{os.getpid()}"
    try:
        beside.write_bytes(to_bytes({k: v.to(dtype).contiguous() for k, v in tensors.items()}))
        text = {"family": MiniVideoModel.family, **about, "sha256": _digest(beside), "model": asdict(config)}
        config_beside.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, folder / WEIGHTS)
        os.replace(config_beside, folder / "config.json")
    finally:
        for file in (beside, config_beside):
            file.unlink(missing_ok=True)

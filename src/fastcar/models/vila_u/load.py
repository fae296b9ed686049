"""The VILA-U family as a :class:`VideoModel`: read from a folder in its on-disk layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fastcar.decoder.llama import LlamaModel
from fastcar.geometry import Geometry
from fastcar.models.base import DepthHead, Prompts
from fastcar.models.checkpoint import Weights, load_module
from fastcar.models.vila_u.config import VilaUConfig, read_config
from fastcar.models.vila_u.depth_head import RQTransformer
from fastcar.models.vila_u.prompt import LlamaTokenizer, padded, template
from fastcar.models.vila_u.rqvae import RQVAE
from fastcar.models.vila_u.siglip import SiglipEncoder
from fastcar.replay.config import ReplayConfig
from fastcar.sampling import SamplingConfig

__all__ = ["VilaU", "load"]


class Projector(nn.Module):
    """Code vectors to decoder inputs."""

    def __init__(self, code_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(code_dim, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class VilaU:
    """A VILA-U model. See :class:`fastcar.models.base.VideoModel`.

    A clip of one frame is an image, which VILA-U was trained to make too. Sampling is recommended as in the official
    code: guidance 3, temperature 1, top-k 900, top-p 0.96.
    """

    family = "vila_u_llama"
    fps = 8

    def __init__(self, folder: Path, config: VilaUConfig, dtype: torch.dtype) -> None:
        self.name, self.config = folder.name, config
        self.tokenizer = LlamaTokenizer(config.folders["llm"])
        _check_depths(config)
        try:
            with torch.device("meta"):
                self.decoder = LlamaModel(config.decoder)
                self.words = nn.Embedding(config.vocab_size, config.decoder.hidden_size)
                self.projector = Projector(config.rqvae.code_dim, config.decoder.hidden_size)
                self.codec = RQVAE(config.rqvae, lambda: SiglipEncoder(config.folders["vision_tower"], dtype))
                self.depth_head = RQTransformer(config.depth_head, self.codec.vectors)
        except RuntimeError as error:
            raise ValueError(f"{folder}: its config asks for sizes that cannot be ({error})") from error
        for part, modules in {
            "llm": ((self.decoder, "model.{}".format), (self.words, "model.embed_tokens.{}".format)),
            "vision_tower": ((self.codec, _codec_name), (self.depth_head, "rqtransformer.{}".format)),
            "mm_projector": ((self.projector, "{}".format),),
        }.items():
            weights = Weights(config.folders[part])  # and those of the part before are closed
            for module, name in modules:
                load_module(module, weights, name, dtype)
                module.eval().requires_grad_(False)
        self.depth, self.codebook_size = config.depth_head.depth, config.depth_head.codebook_size
        self.frames = config.frames
        self.sampling = SamplingConfig(guidance=3.0, temperature=1.0, top_k=900, top_p=0.96)

    def geometry(self, frames: int) -> Geometry:
        height, width, _ = self.config.rqvae.grid
        return Geometry(frames, height * width)

    def check_prompt(self, prompt: str) -> list[str]:
        if not prompt.strip():
            raise ValueError(f"the prompt {prompt!r} has no words; say what the clip shall show")
        most, clip = self.config.max_positions, self.geometry(self.frames).tokens
        words = len(self.tokenizer.encode(template(prompt, self.frames)))
        if most is None or words + clip <= most:
            return []
        return [f"prompt and clip take {words} + {clip} positions, but {self.name} was trained on {most}; shorten it"]

    def token_ids(self, prompts: Sequence[str], guided: bool, frames: int) -> tuple[Tensor, Tensor]:
        """Ids int64 [B, P] and mask bool [B, P], left-padded; with ``guided``, as many blank rows follow."""
        texts = [*prompts, *([""] * len(prompts) if guided else [])]
        return padded([self.tokenizer.encode(template(text, frames)) for text in texts])

    @torch.no_grad()
    def prompts(self, prompts: Sequence[str], guided: bool, frames: int) -> Prompts:
        ids, mask = self.token_ids(prompts, guided, frames)
        return Prompts(self.words(ids), mask, len(ids) // len(prompts))

    @torch.no_grad()
    def next_input(self, prompts: Prompts, codes: Tensor) -> Tensor:
        return self.code_inputs(codes[:, -1]).repeat(prompts.state, 1)

    def code_inputs(self, codes: Tensor) -> Tensor:
        """Decoder inputs [..., H] of codes int64 [..., D]."""
        return self.projector(self.codec.vectors(codes).sum(-2))

    def native_depth_head(self, precision: str) -> Callable[[], DepthHead]:
        return self.depth_head.native(precision)

    def recommended_replay(self, target_ratio: float) -> ReplayConfig:
        # Nothing was calibrated: both rows of a pair together, since only then are weights not read.
        return ReplayConfig(target_ratio=target_ratio, score="input", tie_guidance=True)


def _check_depths(config: VilaUConfig) -> None:
    """See whether the last block of each stack exists, before stacks as deep as the config says are built."""
    last = {
        "llm": [f"model.layers.{config.decoder.layers - 1}.input_layernorm.weight"],
        "vision_tower": [
            f"rqtransformer.head_transformer.blocks.{config.depth_head.layers - 1}.ln1.weight",
            f"rqvaesiglip.decoder.up.{len(config.rqvae.multipliers) - 1}.block.{config.rqvae.res_blocks}.norm1.weight",
        ],
    }
    for part, names in last.items():
        weights = Weights(config.folders[part])
        for name in names:
            if name not in weights:
                raise ValueError(f"{weights.folder} holds no tensor {name!r}, though its config asks for it")


def _codec_name(name: str) -> str:
    return f"rqvaesiglip.{'quantizer.' if name.startswith('codebooks.') else ''}{name}"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> VilaU:
    """Read a checkpoint: ``config.json``, ``llm/``, ``vision_tower/`` and ``mm_projector/``.

    Weights are memory-mapped and converted tensor by tensor, so that loading takes little more than the model itself.

    Raises:
        ValueError: a file, tensor or setting is missing, damaged or not implemented.
        ImportError: sentencepiece is not installed.
    """
    return VilaU(folder, read_config(folder), dtype)

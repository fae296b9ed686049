"""VILA-U's encoder, the vision half of a SigLIP model: frames to latents. Generation does not need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastcar.models.checkpoint import Weights, load_module, read_json

__all__ = ["SiglipEncoder"]

_PREFIX = "rqvaesiglip.siglip_model.vision_model"


class SiglipEncoder(nn.Module):
    """The embeddings and all blocks but the last of a SigLIP vision model, which is where VILA-U quantises.

    Args:
        folder: the ``vision_tower``; beside the weights it must hold SigLIP's own config, in a folder named after
            ``pretrained_model``, as the official code looks for it.

    Raises:
        ValueError: the checkpoint holds no encoder, or not its config.
        ImportError: transformers is not installed.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        try:
            from transformers import SiglipVisionConfig
            from transformers.models.siglip.modeling_siglip import SiglipEncoder, SiglipVisionEmbeddings
        except ImportError as error:
            raise ImportError("VILA-U's encoder needs transformers: pip install 'fastcar[transformers]'") from error
        weights = Weights(folder)
        if f"{_PREFIX}.embeddings.patch_embedding.weight" not in weights:
            raise ValueError(f"{folder} holds no SigLIP encoder, so frames cannot be turned into codes")
        name = str(read_json(folder / "config.json")["rqvaesiglip"].get("pretrained_model", "siglip"))
        path = folder / Path(name).name / "config.json"
        if not path.is_file():
            raise ValueError(f"{path} is missing: put the config.json of the SigLIP model {name!r} there")
        about: dict[str, Any] = dict(read_json(path).get("vision_config") or {})
        about.pop("model_type", None)
        config: Any = SiglipVisionConfig(**about)
        config.num_hidden_layers -= 1
        config._attn_implementation = "sdpa"
        self.size = config.image_size
        self.embeddings, self.encoder = SiglipVisionEmbeddings(config), SiglipEncoder(config)
        load_module(self.embeddings, weights, f"{_PREFIX}.embeddings.{{}}".format, dtype)
        load_module(self.encoder, weights, f"{_PREFIX}.encoder.{{}}".format, dtype)
        self.eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        """Frames uint8 [n, H, W, 3] to latents [n, N, E].

        Raises:
            ValueError: another size than the encoder's.
        """
        if frames.shape[1:] != (self.size, self.size, 3):
            raise ValueError(f"frames must be [n, {self.size}, {self.size}, 3], got {tuple(frames.shape)}")
        dtype = self.embeddings.patch_embedding.weight.dtype
        pixels = (frames.movedim(-1, 1).float() / 127.5 - 1).to(dtype)
        latents: Tensor = self.encoder(inputs_embeds=self.embeddings(pixels)).last_hidden_state
        return latents

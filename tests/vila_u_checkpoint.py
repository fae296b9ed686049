"""Writes random VILA-U checkpoints of any sizes, in the on-disk layout."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fastcar.decoder.llama import LlamaModel
from fastcar.models.vila_u.config import read_config
from fastcar.models.vila_u.depth_head import RQTransformer
from fastcar.models.vila_u.load import Projector, _codec_name
from fastcar.models.vila_u.rqvae import RQVAE

GOLDEN = Path(__file__).parent / "golden"

# nothing is as in the golden checkpoint
LLM = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 80,
    "vocab_size": 384,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
}
VISION = {
    "rqtransformer": {
        "block_size": [3, 2, 3],
        "embed_dim": 24,
        "input_embed_dim_1": 20,
        "input_embed_dim_2": 48,
        "head": {"block": {"n_head": 2}, "n_layer": 1},
        "vocab_size": 10,
    },
    "rqvaesiglip": {
        "code_shape": [3, 2, 3],
        "embed_dim": 20,
        "n_embed": 10,
        "shared_codebook": False,
        "decoder_latent_shape": [4, 6],
        "ddconfig": {
            "attn_resolutions": [8],
            "ch": 32,
            "ch_mult": [1, 2],
            "num_res_blocks": 2,
            "out_ch": 3,
            "resolution": 8,
            "z_channels": 12,
        },
    },
}


SIGLIP = {"hidden_size": 20, "image_size": 6, "intermediate_size": 24, "num_attention_heads": 2}
SIGLIP |= {"num_hidden_layers": 3, "patch_size": 2}


def add_encoder(folder):
    """Give a checkpoint a random SigLIP encoder of 3x3 places; returns it whole."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    model = SiglipVisionModel(SiglipVisionConfig(**SIGLIP)).eval()
    path = folder / "vision_tower" / "model.safetensors"
    names = (name.removeprefix("vision_model.") for name in model.state_dict())
    added = {
        f"rqvaesiglip.siglip_model.vision_model.{n}": t for n, t in zip(names, model.state_dict().values(), strict=True)
    }
    save_file(load_file(path) | added, path)
    config = folder / "vision_tower" / "config.json"
    vision = json.loads(config.read_text())
    vision["rqvaesiglip"]["pretrained_model"] = "google/siglip-tiny"
    config.write_text(json.dumps(vision))
    (folder / "vision_tower" / "siglip-tiny").mkdir()
    about = {"vision_config": {**SIGLIP, "model_type": "siglip_vision_model"}}
    (folder / "vision_tower" / "siglip-tiny" / "config.json").write_text(json.dumps(about))
    return model


def write_checkpoint(folder, llm=LLM, vision=VISION, seed=0, **about):
    """A checkpoint of these configs; returns its folder."""
    for part, config in (("llm", llm), ("vision_tower", vision), ("mm_projector", {"mm_projector_type": "mlp2x_gelu"})):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(config))
    parts = {f"{part}_cfg": {} for part in ("llm", "vision_tower", "mm_projector")}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "vila_u_llama", "num_video_frames": 4, **parts, **about})
    )
    for file in ("tokenizer.model", "added_tokens.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "tiny-vila-u" / "llm" / file, folder / "llm" / file)
    config = read_config(folder)
    torch.manual_seed(seed)
    decoder, codec = LlamaModel(config.decoder), RQVAE(config.rqvae)
    head, projector = (
        RQTransformer(config.depth_head, codec.vectors),
        Projector(config.rqvae.code_dim, llm["hidden_size"]),
    )
    torch.nn.init.normal_(head.pos_emb_d)
    words = torch.randn(config.vocab_size, llm["hidden_size"])
    save_file(
        {f"model.{k}": v for k, v in decoder.state_dict().items()} | {"model.embed_tokens.weight": words},
        folder / "llm" / "model.safetensors",
    )
    vision_weights = {_codec_name(k): v for k, v in codec.state_dict().items()}
    vision_weights |= {f"rqtransformer.{k}": v for k, v in head.state_dict().items()}
    save_file(vision_weights, folder / "vision_tower" / "model.safetensors")
    save_file(projector.state_dict(), folder / "mm_projector" / "model.safetensors")
    return folder

"""What the ``config.json`` files of a VILA-U checkpoint say."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastcar.decoder.config import DecoderConfig
from fastcar.models.checkpoint import read_json

__all__ = ["DepthHeadConfig", "RQVAEConfig", "VilaUConfig", "read_config"]


@dataclass(frozen=True)
class DepthHeadConfig:
    """The RQ-transformer.

    Attributes:
        width, layers, heads: of its blocks.
        code_dim, hidden_size: width of the code vectors and of the decoder's hidden states that come in.
        codebook_size, depth: V and D.
    """

    width: int
    layers: int
    heads: int
    code_dim: int
    hidden_size: int
    codebook_size: int
    depth: int

    def __post_init__(self) -> None:
        for field in fields(self):
            _size(f"rqtransformer: {field.name}", getattr(self, field.name))
        if self.width % self.heads:
            raise ValueError(f"rqtransformer: the width {self.width!r} must be a multiple of the heads, {self.heads!r}")


@dataclass(frozen=True)
class RQVAEConfig:
    """The residual-quantising autoencoder's codebooks and decoder (``ddconfig``, as in VQGAN).

    Attributes:
        code_dim, codebook_size: E and V.
        grid: height, width and depth of a frame's codes; N is height times width.
        shared_codebook: one codebook for all depths, or one each.
        z_channels, out_channels, width, multipliers, res_blocks, attention_at, resolution: of the decoder; ``width``
            times the multipliers are its channels, ``attention_at`` the resolutions with attention.
        latent_size: height and width to which the latent is resized before decoding; None leaves it.
    """

    code_dim: int
    codebook_size: int
    grid: tuple[int, int, int]
    shared_codebook: bool
    z_channels: int
    out_channels: int
    width: int
    multipliers: tuple[int, ...]
    res_blocks: int
    attention_at: tuple[int, ...]
    resolution: int
    latent_size: tuple[int, int] | None

    def __post_init__(self) -> None:
        for name in ("code_dim", "codebook_size", "z_channels", "out_channels", "width", "res_blocks", "resolution"):
            _size(f"rqvaesiglip: {name}", getattr(self, name))
        for name, length in (("grid", 3), ("latent_size", 2), ("multipliers", None), ("attention_at", None)):
            values = getattr(self, name)
            if values is None and name == "latent_size":
                continue
            if not isinstance(values, tuple) or length not in (None, len(values)):
                raise ValueError(f"rqvaesiglip: {name} must list {length or 'some'} sizes, got {values!r}")
            for value in values:
                _size(f"rqvaesiglip: {name}", value)
        if not self.multipliers:
            raise ValueError("rqvaesiglip: ch_mult must list at least one multiplier, got []")


@dataclass(frozen=True)
class VilaUConfig:
    """A whole checkpoint.

    Attributes:
        max_positions: positions that the decoder was trained on; None if the checkpoint does not say.
        frames: of a clip if nobody says.
        folders: of the parts ``llm``, ``vision_tower`` and ``mm_projector``.
    """

    decoder: DecoderConfig
    vocab_size: int
    max_positions: int | None
    depth_head: DepthHeadConfig
    rqvae: RQVAEConfig
    frames: int
    folders: dict[str, Path]

    def __post_init__(self) -> None:
        _size("vocab_size", self.vocab_size)
        _size("num_video_frames", self.frames)


def _size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")


def read_config(folder: Path) -> VilaUConfig:
    """Read a checkpoint's configs.

    Raises:
        ValueError: something is missing, or asks for what this implementation lacks; names the file and the key.
    """
    about = read_json(folder / "config.json")
    folders, parts = {}, {}
    for part in ("llm", "vision_tower", "mm_projector"):
        if f"{part}_cfg" not in about:
            raise ValueError(f"{folder / 'config.json'} has no {part + '_cfg'!r}, which names the folder {part!r}")
        folders[part] = folder / part
        if not folders[part].is_dir():
            raise ValueError(f"{folders[part]} is missing; a VILA-U checkpoint has llm, vision_tower and mm_projector")
        parts[part] = read_json(folders[part] / "config.json")
    path = folders["vision_tower"] / "config.json"
    try:
        llm = parts["llm"]
        decoder = _decoder(llm, folders["llm"] / "config.json")
        head, vae = parts["vision_tower"]["rqtransformer"], parts["vision_tower"]["rqvaesiglip"]
        depth_head = _depth_head(head)
        rqvae = _rqvae(vae)
        vocabulary, frames = llm["vocab_size"], about.get("num_video_frames") or 8
        _size("max_position_embeddings", llm.get("max_position_embeddings") or 1)
    except KeyError as error:
        raise ValueError(f"{folder}: the config has no {error.args[0]!r}") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{folder}: the config is malformed ({error})") from error
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if parts["mm_projector"].get("mm_projector_type", "mlp2x_gelu") != "mlp2x_gelu":
        kind = parts["mm_projector"]["mm_projector_type"]
        raise ValueError(f"{folders['mm_projector']}: mm_projector_type must be 'mlp2x_gelu', got {kind!r}")
    for name, one, other in (
        ("hidden size", depth_head.hidden_size, decoder.hidden_size),
        ("code width", depth_head.code_dim, rqvae.code_dim),
        ("codebook size", depth_head.codebook_size, rqvae.codebook_size),
        ("depth", depth_head.depth, rqvae.grid[2]),
    ):
        if one != other:
            raise ValueError(f"{path}: rqtransformer has the {name} {one}, but its partner has {other}")
    return VilaUConfig(decoder, vocabulary, llm.get("max_position_embeddings"), depth_head, rqvae, frames, folders)


def _decoder(llm: dict[str, Any], path: Path) -> DecoderConfig:
    for key, usual in (("rope_scaling", None), ("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if llm.get(key, usual) not in (usual, None):
            raise ValueError(f"{path}: {key} must be {usual!r}, got {llm[key]!r}; nothing else is implemented")
    heads = llm["num_attention_heads"]
    _size("num_attention_heads", heads)
    return DecoderConfig(
        hidden_size=llm["hidden_size"],
        layers=llm["num_hidden_layers"],
        heads=heads,
        kv_heads=llm.get("num_key_value_heads") or heads,
        head_dim=llm.get("head_dim") or llm["hidden_size"] // heads,
        intermediate_size=llm["intermediate_size"],
        rms_norm_eps=llm.get("rms_norm_eps", 1e-6),
        rope_theta=llm.get("rope_theta") or (llm.get("rope_parameters") or {}).get("rope_theta", 10000.0),
    )


def _depth_head(head: dict[str, Any]) -> DepthHeadConfig:
    for key, usual in (("gelu", "v1"), ("attn_bias", True), ("mlp_bias", True)):
        if head["head"]["block"].get(key, usual) != usual:
            raise ValueError(f"rqtransformer: {key} must be {usual!r}, got {head['head']['block'][key]!r}")
    return DepthHeadConfig(
        width=head["embed_dim"],
        layers=head["head"]["n_layer"],
        heads=head["head"]["block"]["n_head"],
        code_dim=head["input_embed_dim_1"],
        hidden_size=head["input_embed_dim_2"],
        codebook_size=head["vocab_size"],
        depth=head["block_size"][-1],
    )


def _rqvae(vae: dict[str, Any]) -> RQVAEConfig:
    dd, size = vae["ddconfig"], vae.get("decoder_latent_shape")
    sizes = vae["n_embed"] if isinstance(vae["n_embed"], list) else [vae["n_embed"]]
    if len(set(sizes)) != 1:
        raise ValueError(f"codebooks of several sizes are not implemented, got n_embed={sizes!r}")
    for key, usual in (("resamp_with_conv", True), ("give_pre_end", False), ("tanh_out", False)):
        if dd.get(key, usual) != usual:
            raise ValueError(f"ddconfig: {key} must be {usual!r}, got {dd[key]!r}; nothing else is implemented")
    height, width, depth = vae["code_shape"]
    return RQVAEConfig(
        code_dim=vae["embed_dim"],
        codebook_size=sizes[0],
        grid=(height, width, depth),
        shared_codebook=bool(vae.get("shared_codebook", True)),
        z_channels=dd["z_channels"],
        out_channels=dd.get("out_ch", 3),
        width=dd["ch"],
        multipliers=tuple(dd["ch_mult"]),
        res_blocks=dd["num_res_blocks"],
        attention_at=tuple(dd.get("attn_resolutions", ())),
        resolution=dd["resolution"],
        latent_size=tuple(size[:2]) if size else None,
    )

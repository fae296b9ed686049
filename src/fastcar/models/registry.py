"""Finds the family of a checkpoint from its ``config.json``, and loads it.

Third parties add a family by an entry point of the group ``fastcar.models``: its name is the ``family`` (or
``model_type``) in the config, its value ``"module:function"``, called with the folder and a torch dtype.
"""

from __future__ import annotations

import importlib
import json
from importlib.metadata import entry_points
from pathlib import Path

import torch

from fastcar.models.base import VideoModel
from fastcar.models.hub import download, is_hub_id

__all__ = ["FAMILIES", "SHIPPED", "load_model", "shipped_path"]

FAMILIES = {"fastcar-mini": "fastcar.models.mini.load:load", "vila_u_llama": "fastcar.models.vila_u.load:load"}
SHIPPED = {"mini": Path(__file__).parent / "mini" / "weights"}


def shipped_path(name: str) -> Path:
    """The folder of a model that comes with the package."""
    return SHIPPED[name]


def load_model(name_or_path: str | Path, dtype: torch.dtype) -> VideoModel:
    """Load a shipped model by name, a checkpoint folder, or a repository of the Hugging Face hub.

    Raises:
        FileNotFoundError: no such name, folder or repository, or no ``config.json`` in it.
        ValueError: the config is no JSON, or names a family that nobody provides.
    """
    folder = SHIPPED.get(str(name_or_path), Path(name_or_path))
    if not folder.is_dir():
        if not is_hub_id(str(name_or_path)):
            raise FileNotFoundError(
                f"no model {str(name_or_path)!r}: neither a shipped one ({', '.join(SHIPPED)}), nor a checkpoint's "
                "folder, nor a repository of the Hugging Face hub like 'mit-han-lab/vila-u-7b-256'"
            )
        folder = download(str(name_or_path))
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json, so it is no checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        family = config.get("family") or config.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object ({error})") from error
    known = FAMILIES | {point.name: point.value for point in entry_points(group="fastcar.models")}
    if not isinstance(family, str) or family not in known:
        raise ValueError(f"{path} names the family {family!r}; known are {', '.join(sorted(known))}")
    module, function = known[family].split(":")
    model: VideoModel = getattr(importlib.import_module(module), function)(folder, dtype)
    return model

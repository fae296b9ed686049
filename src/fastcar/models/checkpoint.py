"""Reads a folder's weights tensor by tensor, without ever holding more than it gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

__all__ = ["Weights", "load_module", "read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: the file is missing or is none.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; the checkpoint is not whole")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


class Weights:
    """The tensors of a folder, memory-mapped: safetensors or ``pytorch_model*.bin``, whole or sharded with an index.

    One file is open at a time, so what is mapped is at most a shard. A ``.bin`` is read by
    ``torch.load(weights_only=True)`` alone, which runs no code of the file's.

    Raises:
        ValueError: the folder holds no weights, or a file is damaged or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path: Path | None = None
        self._read: Any = None
        self._names: list[str] = []
        for stem in ("model.safetensors", "pytorch_model.bin"):
            index = folder / f"{stem}.index.json"
            if index.is_file():
                shards = read_json(index).get("weight_map")
                if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
                    raise ValueError(f"{index} holds no 'weight_map' of tensors to files")
                if strange := [name for name in shards.values() if Path(name).name != name]:
                    raise ValueError(f"{index} names {strange[0]!r}, which is not a file of its folder")
                self.files = {name: folder / file for name, file in shards.items()}
                return
            if (folder / stem).is_file():
                self._open(folder / stem)
                self.files = dict.fromkeys(self._names, folder / stem)
                return
        raise ValueError(f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, nor their index")

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, still on disk until it is used.

        Raises:
            ValueError: no such tensor, or its file is damaged or missing.
        """
        if name not in self.files:
            raise ValueError(f"{self.folder} holds no tensor {name!r}")
        path = self.files[name]
        self._open(path)
        try:
            return self._read(name)
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} does not give the tensor {name!r} ({error})") from error

    def _open(self, path: Path) -> None:
        if path == self._path:
            return
        if not path.is_file():
            raise ValueError(f"{path} is missing; the checkpoint is not whole")
        self._path, self._read, self._names = None, None, []
        try:
            if path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                self._read, self._names = file.get_tensor, list(file.keys())
            else:
                tensors = _load_bin(path)
                self._read, self._names = tensors.__getitem__, list(tensors)
        except Exception as error:  # a damaged header or pickle fails in as many ways as there are bytes
            told = " ".join(str(error).split())[:200]
            raise ValueError(f"{path} is damaged, or holds more than tensors ({told})") from error
        self._path = path


def _load_bin(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        found = torch.load(path, map_location="cpu", weights_only=True)  # written before files could be mapped
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError("it must hold a dictionary of tensors")
    return found


def load_module(
    module: nn.Module,
    weights: Weights,
    name: Callable[[str], str] = lambda name: name,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fill a module built on the ``meta`` device, one tensor after another, in ``dtype``.

    Args:
        name: from the module's parameter names to the checkpoint's.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    state: dict[str, Tensor] = {}
    wanted = module.state_dict()
    for own in sorted(wanted, key=lambda own: weights.files.get(name(own), weights.folder)):  # shard by shard
        expected, tensor = wanted[own], weights[name(own)]
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{weights.files[name(own)]}: {name(own)!r} must be {list(expected.shape)}, got {list(tensor.shape)}"
            )
        state[own] = tensor.to(dtype, copy=True)
    module.load_state_dict(state, assign=True)

"""Checkpoints of a training run: one safetensors file, written atomically, holding tensors and a JSON header.

Nothing is pickled. A run's randomness follows from (seed, step), so the step is all that must be known to resume.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

__all__ = ["load_checkpoint", "load_weights", "pack", "save_checkpoint", "unpack"]


def pack(state: Mapping[Any, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split nested mappings (such as an optimiser's ``state_dict()["state"]``) into tensors and plain values."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            more_tensors, more_values = pack(value, name + "/")
            tensors |= more_tensors
            values |= more_values
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            values[name] = value
    return tensors, values


def unpack(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[Any, Any]:
    """Undo :func:`pack`; keys that look like integers become integers, as optimisers number their parameters."""
    state: dict[Any, Any] = {}
    for name, value in {**tensors, **values}.items():
        node = state
        *path, last = (int(part) if part.isdigit() else part for part in name.split("/"))
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return state


def save_checkpoint(path: Path, state: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Write ``state`` (nested tensors and numbers) and ``header`` (JSON) beside ``path``, then rename over it."""
    tensors, values = pack(state)
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, beside, metadata={"header": json.dumps(dict(header)), "values": json.dumps(values)})
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_checkpoint(path: Path, kind: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what :func:`save_checkpoint` wrote: ``(state, header)``.

    Args:
        kind: what the header's ``kind`` must be.

    Raises:
        ValueError: the file is not such a checkpoint, or is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint ({error}); delete it to start afresh") from error
    if "header" not in metadata:
        raise ValueError(f"{path} is no training checkpoint: it has no header; delete it to start afresh")
    header = json.loads(metadata["header"])
    if kind is not None and header.get("kind") != kind:
        raise ValueError(f"{path} is a checkpoint of kind {header.get('kind')!r}; expected one of a {kind}")
    return unpack(tensors, json.loads(metadata["values"])), header


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Fill a module.

    Raises:
        ValueError: names or shapes differ; the first difference is told.
    """
    own = module.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        ours, theirs = (tuple(d[name].shape) if name in d else None for d in (own, weights))
        if ours != theirs:
            raise ValueError(f"{source} do not fit this model: {name} is {theirs} there, but {ours} here")
    module.load_state_dict(dict(weights))


def generator(*key: int) -> torch.Generator:
    """A CPU generator whose stream follows from integers alone, such as (seed, step)."""
    mixed = 0
    for part in key:
        mixed = (mixed * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(mixed)

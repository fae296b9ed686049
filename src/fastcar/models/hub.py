"""Checkpoints from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["download", "is_hub_id"]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a repository's: ``owner/name``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def download(repository: str) -> Path:
    """The folder of a repository's newest snapshot, fetched if it is not in the cache.

    Raises:
        FileNotFoundError: it can neither be fetched nor is it in the cache; says how to get it by hand.
        ImportError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"no folder {repository!r} here, and fetching it needs huggingface_hub: pip install 'fastcar[hub]'"
        ) from error
    try:
        return Path(snapshot_download(repository))
    except Exception as error:  # offline, unknown, private, or a full disk: the hub's errors have no common base
        told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{repository!r} is no folder here, and the Hugging Face hub does not give it ({told}); where there is a "
            f"network, run 'hf download {repository} --local-dir {Path(repository).name}', put that folder here, and "
            "load it by its path"
        ) from error

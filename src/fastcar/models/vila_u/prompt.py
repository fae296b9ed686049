"""VILA-U's prompts: the chat template, and the Llama tokenizer without a library of its own.

The token ids are those of the slow Llama tokenizer with ``legacy=False``: one space before the text, special tokens cut
out of it, every piece between them encoded by SentencePiece as it stands.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["LlamaTokenizer", "padded", "template"]

_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
# SentencePiece's model file is a protocol buffer, in which what is appended overrides: normalizer_spec (field 3), its
# add_dummy_prefix (field 3) = false.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


def template(prompt: str, frames: int) -> str:
    """The text that asks for a clip, or for an image if it has one frame; the blank prompt of guidance is ``""``."""
    prompt = prompt.strip()
    said = f" {prompt} " if prompt else ""
    return f"{_SYSTEM}USER:{said}ASSISTANT: {'<im_start>' if frames == 1 else '<vi_start>'}"


class LlamaTokenizer:
    """Text to ids, from ``tokenizer.model`` and the added tokens beside it.

    Raises:
        ValueError: a file is missing or damaged.
        ImportError: sentencepiece is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ImportError("VILA-U's tokenizer needs sentencepiece: pip install 'fastcar[vila-u]'") from error
        path = folder / "tokenizer.model"
        if not path.is_file():
            raise ValueError(f"{path} is missing; the checkpoint is not whole")
        try:
            self.pieces = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes() + _NO_DUMMY_PREFIX)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is no SentencePiece model ({error})") from error
        self.bos = self.pieces.bos_id()
        self.special = {self.pieces.id_to_piece(i): i for i in (self.pieces.unk_id(), self.bos, self.pieces.eos_id())}
        self.strips: dict[str, tuple[bool, bool]] = {}
        added, settings = folder / "added_tokens.json", folder / "tokenizer_config.json"
        try:
            if added.is_file():
                self.special |= {str(k): int(v) for k, v in json.loads(added.read_text(encoding="utf-8")).items()}
            if settings.is_file():
                known = json.loads(settings.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
                for number, token in known.items():
                    self.special[token["content"]] = int(number)
                    self.strips[token["content"]] = bool(token.get("lstrip")), bool(token.get("rstrip"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder}: added_tokens.json or tokenizer_config.json is malformed ({error})") from error
        longest_first = sorted(self.special, key=len, reverse=True)
        self.split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str) -> list[int]:
        """Ids, the first of them ``<s>``."""
        parts = self.split.split("▁" + text.replace("▁", " "))
        for i in range(1, len(parts), 2):  # special tokens
            left, right = self.strips.get(parts[i], (False, False))
            if left:
                parts[i - 1] = parts[i - 1].rstrip()
            if right:
                parts[i + 1] = parts[i + 1].lstrip()
        ids = [self.bos]
        for i, part in enumerate(parts):
            ids += [self.special[part]] if i % 2 else self.pieces.encode(part)
        return ids


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids of rows, padded with 0 on the left: ``(ids int64 [B, P], mask bool [B, P])``, False at padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return ids, mask

"""The mini model's prompt encoder: lower-case words of a small closed vocabulary."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["PAD", "START", "UNKNOWN", "WordTokenizer"]

PAD, START, UNKNOWN = 0, 1, 2


class WordTokenizer:
    """Captions to word ids. Ids 0, 1, 2 are padding, start of the picture and unknown; then the words in order."""

    def __init__(self, words: Sequence[str], max_words: int) -> None:
        self.words, self.max_words = tuple(words), max_words
        self.ids = {word: i for i, word in enumerate(self.words, start=3)}

    @staticmethod
    def split(caption: str) -> list[str]:
        return re.findall(r"[^\W_]+(?:'[^\W_]+)*", caption.lower())

    def unknown(self, caption: str) -> dict[str, list[str]]:
        """Words of a caption that are not in the vocabulary, each with the known words most like it."""
        strange = dict.fromkeys(word for word in self.split(caption) if word not in self.ids)
        return {word: difflib.get_close_matches(word, self.words, n=3, cutoff=0.5) for word in strange}

    def check(self, caption: str) -> None:
        """Whether a caption can be read.

        Raises:
            ValueError: the caption has no words, or more than the model reads.
        """
        count = len(self.split(caption))
        if count == 0:
            raise ValueError(f"{caption!r} has no words; say what the clip shall show")
        if count >= self.max_words:
            raise ValueError(
                f"{caption!r} has {count} words, but this model reads at most {self.max_words - 1}; shorten it"
            )

    def encode(self, caption: str) -> Tensor:
        """One caption to int64 [max_words]: padding, words, start. The empty caption is the blank of guidance.

        Raises:
            ValueError: as :meth:`check`, but for the empty caption.
        """
        if caption:
            self.check(caption)
        ids = [self.ids.get(word, UNKNOWN) for word in self.split(caption)]
        return torch.tensor([PAD] * (self.max_words - 1 - len(ids)) + ids + [START])

"""Where training clips come from: the rendered world, or a user's own folder of captioned videos."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from fastcar.training import world
from fastcar.video import read_video

__all__ = ["ClipSource", "FolderClips", "WorldClips"]


class ClipSource(Protocol):
    """Captioned clips by number, the same for the same number every time.

    ``repr()`` identifies the content: equal for equal clips in every process, so that it serves as the key of a cache.
    """

    def __len__(self) -> int: ...

    def get(self, index: int) -> tuple[np.ndarray, str]:
        """Clip ``index``: frames uint8 [F, H, W, 3] and its caption."""
        ...


class WorldClips:
    """Clips of :mod:`fastcar.training.world`, rendered when asked for.

    Raises:
        ValueError: ``split`` is not one of the world's.
    """

    def __init__(self, split: str = "train", seed: int = 0, count: int = 1_000_000) -> None:
        if split not in world.SPLITS:
            raise ValueError(f"unknown split {split!r}; expected one of {', '.join(world.SPLITS)}")
        self.split, self.seed, self.count = split, seed, count

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        """The settings, and a digest of the first clips, which changes when the world is rendered otherwise."""
        digest = hashlib.sha256()
        for frames, caption in map(self.get, range(8)):
            digest.update(frames.tobytes() + caption.encode())
        return f"WorldClips({self.split!r}, seed={self.seed}, count={self.count}, {digest.hexdigest()[:16]})"

    def get(self, index: int) -> tuple[np.ndarray, str]:
        """Clip ``index``: frames uint8 [8, 64, 64, 3] and its caption."""
        scene, caption = world.sample(self.split, self.seed, index)
        return world.render(scene), caption


@dataclass(frozen=True)
class _Entry:
    file: str
    caption: str
    line: int
    size: int


class FolderClips:
    """A user's own folder: videos, and their captions in ``captions.csv`` or ``captions.jsonl``.

    The CSV has a header with the columns ``file`` and ``caption``; each line of the JSONL is an object with these keys.
    Files are named relative to the folder: anything :func:`fastcar.video.read_video` reads. A video may have several
    captions. Videos are read when asked for: of each, ``frames`` evenly spaced frames, their middle square, resized to
    ``side``.

    Args:
        folder: where the captions and videos lie.
        side: height and width of the clips, in pixels.
        frames: frames of a clip.

    Raises:
        FileNotFoundError: no captions, or a video that they name is missing.
        ValueError: captions in two files, without a needed column, empty, or damaged.
    """

    def __init__(self, folder: str | Path, side: int = 64, frames: int = 8) -> None:
        if side < 1 or frames < 1:
            raise ValueError(f"side and frames must be at least 1, got {side!r} and {frames!r}")
        self.folder, self.side, self.frames = Path(folder), side, frames
        self._captions = _captions_file(self.folder)
        self._entries = list(_entries(self._captions))
        if not self._entries:
            raise ValueError(f"{self._captions} names no clips; expected a file and a caption on each line")

    @classmethod
    def split(cls, folder: str | Path, side: int = 64, frames: int = 8) -> tuple[FolderClips, FolderClips]:
        """The folder's clips for training and those held out for validation.

        Held out is every 20th clip by a hash of its file's name: the side a clip is on never changes when others come
        or go. If that leaves one side empty, the clip with the smallest (or largest) hash goes there.

        Raises:
            FileNotFoundError, ValueError: as for the class; or fewer than two videos.
        """
        whole, train, validation = (cls(folder, side, frames) for _ in range(3))
        hashes = {
            entry.file: int.from_bytes(hashlib.sha256(entry.file.encode()).digest(), "big") for entry in whole._entries
        }
        if len(hashes) < 2:
            raise ValueError(f"{whole._captions} names one video; training and validation need at least two")
        held_out = {file for file, value in hashes.items() if value % 20 == 0} or {min(hashes, key=hashes.__getitem__)}
        if len(held_out) == len(hashes):
            held_out.remove(max(hashes, key=hashes.__getitem__))
        train._entries = [entry for entry in whole._entries if entry.file not in held_out]
        validation._entries = [entry for entry in whole._entries if entry.file in held_out]
        return train, validation

    def check_captions(self, check: Callable[[str], object]) -> None:
        """Call ``check`` with every caption; a ValueError of it then names the line.

        Raises:
            ValueError: as ``check`` does.
        """
        entry = self._entries[0]
        try:
            for entry in self._entries:
                check(entry.caption)
        except ValueError as error:
            raise ValueError(f"{self._captions}, line {entry.line}: {error}") from error

    @property
    def captions(self) -> list[str]:
        """The captions of all clips, in order; no video is read."""
        return [entry.caption for entry in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        """The settings, and a digest of captions, file names and file sizes."""
        rows = json.dumps([(entry.file, entry.caption, entry.size) for entry in self._entries])
        digest = hashlib.sha256(rows.encode()).hexdigest()[:16]
        return f"FolderClips(side={self.side}, frames={self.frames}, count={len(self)}, {digest})"

    def get(self, index: int) -> tuple[np.ndarray, str]:
        """Clip ``index``: frames uint8 [frames, side, side, 3] and its caption.

        Raises:
            FileNotFoundError: the video has gone.
            ValueError: the video cannot be read, or has fewer than ``frames`` frames.
        """
        entry = self._entries[index]
        try:
            video = read_video(self.folder / entry.file, self.frames)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"{self._captions}, line {entry.line}: {error}") from error
        return np.stack([_square(frame, self.side) for frame in video]), entry.caption


def _square(frame: np.ndarray, side: int) -> np.ndarray:
    """The middle square of a frame [H, W, 3], resized to ``side``."""
    height, width, _ = frame.shape
    short = min(height, width)
    top, left = (height - short) // 2, (width - short) // 2
    square = np.ascontiguousarray(frame[top : top + short, left : left + short])
    return np.asarray(Image.fromarray(square).resize((side, side), Image.Resampling.LANCZOS))


def _captions_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; expected one with videos and captions.csv or captions.jsonl")
    found = [folder / name for name in ("captions.csv", "captions.jsonl") if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(
            f"{folder} has no captions.csv (columns file,caption) or captions.jsonl "
            '(lines like {"file": "a.mp4", "caption": "a dog runs"}); write one that names the videos'
        )
    if len(found) > 1:
        raise ValueError(f"{folder} has both captions.csv and captions.jsonl; keep one of them")
    return found[0]


def _entries(captions: Path) -> Iterator[_Entry]:
    """The lines of a captions file, each checked: both values are there, and so is the video."""
    for line, row in _csv(captions) if captions.suffix == ".csv" else _jsonl(captions):
        at = f"{captions}, line {line}"
        for key in ("file", "caption"):
            if not isinstance(row.get(key), str) or not str(row[key]).strip():
                raise ValueError(f"{at}: no {key!r} (got {row.get(key)!r}); expected a text that is not empty")
        file, caption = str(row["file"]).strip(), " ".join(str(row["caption"]).split())
        video = captions.parent / file
        if not video.exists():
            raise FileNotFoundError(f"{at}: the video {video} does not exist; correct its name or remove the line")
        size = sum(f.stat().st_size for f in video.iterdir()) if video.is_dir() else video.stat().st_size
        yield _Entry(file, caption, line, size)


def _csv(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            missing = [key for key in ("file", "caption") if key not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(
                    f"{path} lacks the column {' and '.join(map(repr, missing))}; "
                    f"expected a first line with file,caption, got {','.join(reader.fieldnames or ())!r}"
                )
            for row in reader:
                if None in row:
                    raise ValueError(
                        f"{path}, line {reader.line_num}: more values than columns; quote captions with commas"
                    )
                yield reader.line_num, dict(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV in UTF-8 ({error})") from error


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {line}: no JSON ({error})") from error
                if not isinstance(row, dict):
                    raise ValueError(
                        f'{path}, line {line}: expected {{"file": ..., "caption": ...}}, got {text.strip()!r}'
                    )
                yield line, row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read in UTF-8 ({error})") from error

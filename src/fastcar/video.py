"""Clips as files: write mp4, gif and png contact sheets; read whatever PyAV and Pillow can.

A file is written beside its place and renamed over it when whole, so an error or Ctrl-C leaves nothing half-written.
Small clips are enlarged by a whole factor, nearest neighbour, since players blur or shrink pictures of 64 pixels.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import Interpolation
from PIL import GifImagePlugin, Image, ImageDraw, ImageFont, ImageSequence

__all__ = ["EXTENSIONS", "check_output", "contact_sheet", "read_video", "write_sheet", "write_video"]

EXTENSIONS = (".mp4", ".gif", ".png")

_SHORT_SIDE = 256  # of an mp4 or gif, at least
_CELL = 128  # short side of a picture in a contact sheet, at least
_BT709 = 1
_STUDIO_RANGE = 1
_PICTURES = (".gif", ".png", ".apng", ".webp")


def write_video(frames: np.ndarray, path: str | Path, fps: float = 8, scale: int | None = None) -> Path:
    """Write a clip, whole or not at all: ``.mp4`` (H.264), ``.gif`` (looped) or ``.png`` (contact sheet).

    Args:
        frames: uint8 [F, H, W, 3].
        path: where to, in a folder that exists; an existing file is replaced.
        fps: frames a second; a gif keeps time in hundredths of a second, and a contact sheet has none.
        scale: whole factor by which pictures are enlarged; by default one that makes the short side at least 256
            (128 in a contact sheet). Factors are even in an mp4, so that its halved colour resolution loses nothing.

    Returns:
        The path.

    Raises:
        ValueError: another extension, frames of another shape or dtype, or a bad ``fps`` or ``scale``.
        OSError: the file cannot be written.
    """
    path = check_output(path)
    frames = _checked(frames)
    if not 0 < fps <= 1000:
        raise ValueError(f"fps must lie in 0..1000, got {fps!r}")
    if scale is not None and (not isinstance(scale, int) or scale < 1):
        raise ValueError(f"scale must be a whole number of at least 1, got {scale!r}")
    with _beside(path) as part:
        if path.suffix.lower() == ".mp4":
            _write_mp4(frames, part, fps, scale)
        elif path.suffix.lower() == ".gif":
            _write_gif(frames, part, fps, scale or _enlargement(frames, _SHORT_SIDE))
        else:
            _write_png(contact_sheet([("", frames)], scale=scale), part)
    return path


def write_sheet(
    rows: Sequence[tuple[str, np.ndarray]], path: str | Path, columns: int = 8, scale: int | None = None
) -> Path:
    """Write a :func:`contact_sheet` of labelled clips as ``.png``, whole or not at all.

    Returns:
        The path.

    Raises:
        ValueError: another extension, or clips that do not fit together.
        OSError: the file cannot be written.
    """
    path = check_output(path, (".png",))
    sheet = contact_sheet(rows, columns, scale)
    with _beside(path) as part:
        _write_png(sheet, part)
    return path


def check_output(path: str | Path, extensions: Sequence[str] = EXTENSIONS) -> Path:
    """Check that a file can be written, before any time is spent on what goes into it. Leaves nothing behind.

    Returns:
        The path.

    Raises:
        ValueError: another extension than ``extensions``.
        OSError: the path is a folder, or nothing can be written where it lies.
    """
    path = Path(path)
    if path.suffix.lower() not in extensions:
        raise ValueError(f"{path} has the unknown extension {path.suffix!r}; expected one of {', '.join(extensions)}")
    with _explained(path):
        is_folder, has_folder = path.is_dir(), path.parent.is_dir()
    if is_folder:
        raise IsADirectoryError(f"{path} is a folder; expected the name of a file")
    if not has_folder:
        raise NotADirectoryError(
            f"{path} cannot be written: there is no folder {path.parent}; make it or choose another"
        )
    with _explained(path):
        probe = path.with_name(f".{secrets.token_hex(8)}")
        try:
            probe.touch()
        finally:
            probe.unlink(missing_ok=True)
    return path


def contact_sheet(
    rows: Sequence[tuple[str, np.ndarray]], columns: int = 8, scale: int | None = None, gap: int = 4
) -> np.ndarray:
    """Clips below one another, each under its label, frames from left to right: uint8 [height, width, 3].

    Args:
        rows: label and frames uint8 [F, H, W, 3] of each clip, all of one H and W; an empty label takes no room.
        columns: frames beside one another; longer clips go on in the next line.
        scale: whole factor by which frames are enlarged; by default one that makes the short side at least 128.
        gap: white pixels between frames.

    Raises:
        ValueError: no rows, or frames of another shape or dtype.
    """
    clips = [(label, _checked(frames)) for label, frames in rows]
    if not clips:
        raise ValueError("a contact sheet needs at least one clip")
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns!r}")
    sizes = {frames.shape[1:3] for _, frames in clips}
    if len(sizes) > 1:
        raise ValueError(f"all clips of a contact sheet must have one size, got {sorted(sizes)}")
    scale = scale or _enlargement(clips[0][1], _CELL)
    height, width = (side * scale for side in sizes.pop())
    columns = min(columns, max(len(frames) for _, frames in clips))
    sheet_width = columns * (width + gap) + gap
    parts = []
    for label, frames in clips:
        if label:
            parts.append(_text(label, sheet_width, gap))
        cells = math.ceil(len(frames) / columns)
        canvas = np.full((cells * (height + gap), sheet_width, 3), 255, np.uint8)
        for i, frame in enumerate(_enlarge(frames, scale)):
            top, left = i // columns * (height + gap), gap + i % columns * (width + gap)
            canvas[top : top + height, left : left + width] = frame
        parts.append(canvas)
    return np.concatenate([np.full((gap, sheet_width, 3), 255, np.uint8), *parts])


def read_video(path: str | Path, frames: int | None = None) -> np.ndarray:
    """Read a video (any that PyAV reads), an animated gif, png or webp, or a folder of numbered PNG files.

    Args:
        path: file or folder.
        frames: how many evenly spaced frames to take, beginning with the first; all if not given. Only these are
            converted and kept, so a long video costs two decodings but little memory.

    Returns:
        uint8 [F, H, W, 3], turned upright if the file says how.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it cannot be read as a video, or has fewer than ``frames`` frames.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a video file or a folder of PNG files")
    if frames is not None and frames < 1:
        raise ValueError(f"frames must be at least 1, got {frames!r}")
    source = _read_folder if path.is_dir() else _read_pictures if path.suffix.lower() in _PICTURES else _read_av
    try:
        if frames is None:
            kept = [picture() for picture in source(path)]
        else:
            total = sum(1 for _ in source(path))
            if total < frames:
                raise _TooShortError(
                    f"{path} has {total} frames, fewer than the {frames} asked for; choose a longer video"
                )
            wanted = {i * total // frames for i in range(frames)}
            kept = [picture() for i, picture in enumerate(source(path)) if i in wanted]
    except _TooShortError as error:
        raise ValueError(str(error)) from None
    except (av.FFmpegError, OSError, ValueError, SyntaxError, EOFError) as error:  # PyAV's and Pillow's own
        raise ValueError(
            f"{path} cannot be read as a video ({error}); expected mp4, gif, or a folder of PNG"
        ) from error
    if not kept:
        raise ValueError(f"{path} holds no frames; expected a video, a gif, or a folder of PNG files")
    sizes = {picture.shape[:2] for picture in kept}
    if len(sizes) > 1:
        raise ValueError(f"{path} mixes frames of several sizes (height, width): {sorted(sizes)}; expected one")
    return np.stack(kept)


class _TooShortError(Exception):
    pass


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to: renamed over it if the block ends well, removed if not."""
    part = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
    with _explained(path):
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say of any error of the file system which path was to be written, and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{path} cannot be written ({reason}); choose another folder or name") from error


def _checked(frames: np.ndarray) -> np.ndarray:
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ValueError(f"frames must be uint8 [F, H, W, 3], got {frames.dtype} {list(frames.shape)}")
    return frames


def _enlargement(frames: np.ndarray, short_side: int) -> int:
    return max(1, math.ceil(short_side / min(frames.shape[1:3])))


def _enlarge(pictures: np.ndarray, scale: int) -> np.ndarray:
    """Repeat every pixel of pictures [F, H, W, ...]."""
    return pictures.repeat(scale, 1).repeat(scale, 2)


def _write_mp4(
    frames: np.ndarray, path: Path, fps: float, scale: int | None = None, encoder: str | None = None
) -> None:
    """H.264 where PyAV has x264, else MPEG-4; BT.709, 4:2:0 as every player wants it."""
    height, width = frames.shape[1:3]
    if scale is None:
        scale = _enlargement(frames, _SHORT_SIDE)
        if scale > 1 or height % 2 or width % 2:
            scale += scale % 2
    if height * scale % 2 or width * scale % 2:
        raise ValueError(f"an mp4 needs even sides, got {width * scale}x{height * scale}; choose an even scale")
    encoder = encoder or ("libx264" if "libx264" in av.codecs_available else "mpeg4")
    fine = int(Interpolation.AREA | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP)
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream(encoder, rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width * scale, height * scale, "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _STUDIO_RANGE
        if encoder == "libx264":
            stream.options = {"crf": "12", "preset": "medium"}
        else:
            context.qmin, context.qmax = 1, 4
        for picture in frames:
            large = np.ascontiguousarray(_enlarge(picture[None], scale)[0])
            frame = av.VideoFrame.from_ndarray(large, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=_BT709, interpolation=fine)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _write_gif(frames: np.ndarray, path: Path, fps: float, scale: int) -> None:
    """One palette for all frames and no dithering, so that nothing flickers.

    The blocks are strung together here because ``Image.save`` merges equal neighbours, and a clip would lose frames.
    """
    count, height, width, _ = frames.shape
    palette = Image.fromarray(frames.reshape(count * height, width, 3))
    refine = int(frames.size <= 3 * 65536)  # k-means takes a minute on large clips
    palette = palette.quantize(256, Image.Quantize.MEDIANCUT, kmeans=refine, dither=Image.Dither.NONE)
    indices = _enlarge(np.asarray(palette).reshape(count, height, width), scale)
    ends = [max(round(100 * (i + 1) / fps), 2 * (i + 1)) for i in range(count)]  # hundredths of a second
    with path.open("wb") as file:
        for i, picture in enumerate(indices):
            image = Image.frombytes("P", (width * scale, height * scale), np.ascontiguousarray(picture).tobytes())
            image.putpalette(palette.getpalette() or [])
            delay = 10 * (ends[i] - (ends[i - 1] if i else 0))
            if i == 0:
                file.writelines(GifImagePlugin.getheader(image, info={"loop": 0, "duration": delay})[0])
            file.writelines(GifImagePlugin.getdata(image, duration=delay))
        file.write(b";")


def _write_png(picture: np.ndarray, path: Path) -> None:
    Image.fromarray(picture).save(path, format="PNG", optimize=True)


def _text(label: str, width: int, gap: int) -> np.ndarray:
    """A label in black on white, in as many lines as it needs: uint8 [height, width, 3]."""
    font = ImageFont.load_default(14)
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    lines: list[str] = []
    for word in label.split():
        if lines and pen.textlength(f"{lines[-1]} {word}", font) <= width - 2 * gap:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    strip = Image.new("RGB", (width, 18 * len(lines) + 4), "white")
    ImageDraw.Draw(strip).multiline_text((gap, 1), "\n".join(lines), "black", font, spacing=3)
    return np.asarray(strip)


# Readers yield, for each frame, a function that converts it: a frame that nobody wants is never converted.
_Picture = Callable[[], np.ndarray]


def _read_av(path: Path) -> Iterator[_Picture]:
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError("no video stream")
        for frame in container.decode(container.streams.video[0]):

            def convert(frame: av.VideoFrame = frame) -> np.ndarray:
                return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))

            yield convert


def _read_pictures(path: Path) -> Iterator[_Picture]:
    with Image.open(path) as image:
        for picture in ImageSequence.Iterator(image):

            def convert(picture: Image.Image = picture) -> np.ndarray:
                return np.asarray(picture.convert("RGB"))

            yield convert


def _read_folder(path: Path) -> Iterator[_Picture]:
    def number(file: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", file.stem)]

    for file in sorted((f for f in path.iterdir() if f.suffix.lower() == ".png"), key=number):

        def convert(file: Path = file) -> np.ndarray:
            with Image.open(file) as image:
                return np.asarray(image.convert("RGB"))

        yield convert

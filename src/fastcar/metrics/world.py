"""What a clip of the captioned world shows, read from its pixels alone, and whether that is what was asked for.

Analysis by synthesis, without learned weights: the background is the best of all the world's backgrounds; each object
is a colour of the palette; in every frame its outline is compared with the world's stamps (shape, radius, angle); its
motion is the best of the world's paths. A clip must hold what it shows over all its frames: an object that melts,
vanishes, or stops half-way is not counted as right.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import binary_dilation

from fastcar.training import world

__all__ = ["Judgement", "Observation", "ObservedObject", "adherence", "judge", "observe"]

_CONTRAST = 45  # a pixel this far from the background, in any channel, belongs to an object
_SEEN = 0.55  # overlap (IoU) below which a frame shows no known shape
_CANVAS = 40  # side of the window in which outlines are compared
_RADII = range(4, 17)
_ANGLES = tuple(15.0 * t for t in range(world.FRAMES))
_PALETTE = np.array(list(world.COLOURS.values()), np.float32)


@dataclass(frozen=True, eq=False)
class ObservedObject:
    """One object of a clip; ``None`` where nothing certain can be said.

    Attributes:
        colour, shape, motion: in the world's words. A shape counts only if nearly every frame shows it.
        path: centre x, centre y, radius in pixels, angle in degrees of every frame, float64 [F, 4]; NaN where unseen.
        overlap: IoU of the best outline of the shape in every frame, float64 [F].
    """

    colour: str | None
    shape: str | None
    motion: str | None
    path: np.ndarray
    overlap: np.ndarray


@dataclass(frozen=True, eq=False)
class Observation:
    """What a clip shows; kind and colour of the background are None if it is none of the world's."""

    kind: str | None
    background_colour: str | None
    objects: tuple[ObservedObject, ...]


@dataclass(frozen=True)
class Judgement:
    """Which of the things asked for a clip shows; with two objects, both must be right."""

    colour: bool
    shape: bool
    motion: bool
    background: bool
    background_colour: bool

    @property
    def everything(self) -> bool:
        """Whether nothing is wrong."""
        return self.colour and self.shape and self.motion and self.background and self.background_colour


def judge(frames: np.ndarray, scene: world.Scene) -> Judgement:
    """Compare a clip, uint8 [F, 64, 64, 3], with the scene that was asked for."""
    seen = observe(frames, len(scene.sprites))
    objects = {item.colour: item for item in seen.objects}
    found = [objects.get(sprite.colour) for sprite in scene.sprites]
    if len(scene.sprites) == 1 and seen.objects:
        found = [seen.objects[0]]  # whatever its colour, so that a wrong colour does not spoil shape and motion

    def right(name: str) -> bool:
        return all(
            item is not None and getattr(item, name) == getattr(sprite, name)
            for item, sprite in zip(found, scene.sprites, strict=True)
        )

    return Judgement(
        right("colour"),
        right("shape"),
        right("motion"),
        seen.kind == scene.kind,
        seen.background_colour == scene.colour,
    )


def observe(frames: np.ndarray, objects: int = 1) -> Observation:
    """Read a clip, uint8 [F, 64, 64, 3], that shows at most ``objects`` (1 or 2) objects.

    Raises:
        ValueError: frames of another shape or dtype.
    """
    if frames.dtype != np.uint8 or frames.shape[1:] != (world.SIDE, world.SIDE, 3):
        raise ValueError(f"frames must be uint8 [F, {world.SIDE}, {world.SIDE}, 3], got {frames.dtype} {frames.shape}")
    pixels = frames.astype(np.float32)
    name, back = _background(pixels)
    difference = pixels - back
    outside = np.abs(difference).max(-1) > _CONTRAST
    nearest = np.square(pixels[..., None, :] - _PALETTE).sum(-1).argmin(-1)
    counts = np.bincount(nearest[outside], minlength=len(_PALETTE))
    chosen = [int(c) for c in counts.argsort()[::-1][:objects] if counts[c] >= 8 * len(frames)]
    items = []
    for colour in chosen:
        toward = _PALETTE[colour] - back
        coverage = ((difference * toward).sum(-1) / np.square(toward).sum(-1)).clip(0, 1)
        coverage = np.where(outside, coverage.clip(0.5), coverage)  # a pixel of any odd colour spoils the outline
        for other in chosen:
            if other != colour:  # what lies at the other object is its own, its blended edges too
                core = outside & (nearest == other) & (np.abs(pixels - _PALETTE[other]).max(-1) < 40)
                coverage[binary_dilation(core, np.ones((1, 5, 5)))] = 0
        coverage[coverage < 0.25] = 0
        items.append(_read_object(list(world.COLOURS)[colour], coverage))
    return Observation(name and name[0], name and name[1], tuple(items))


def adherence(judgements: Sequence[Judgement]) -> dict[str, dict[str, float]]:
    """Share of clips that are right in ``colour``, ``shape``, ``motion``, ``background``, and in everything.

    Returns:
        For each: ``mean``, and ``low`` and ``high`` of its 95 % Wilson interval.
    """
    names = ("colour", "shape", "motion", "background", "background_colour", "everything")
    return {name: _wilson(sum(getattr(j, name) for j in judgements), len(judgements)) for name in names}


def _wilson(right: int, count: int) -> dict[str, float]:
    if not count:
        return {"mean": 0.0, "low": 0.0, "high": 1.0}
    z, p = 1.959964, right / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (p * (1 - p) / count + z * z / (4 * count * count)) ** 0.5
    return {"mean": p, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


@functools.lru_cache(maxsize=1)
def _backgrounds() -> tuple[list[tuple[str, str]], np.ndarray]:
    names, pictures = [], []
    for kind in world.KINDS:
        for colour in world.BACKGROUND_COLOURS:
            for variant in range(4):
                picture = world.background(kind, colour, variant)
                if not any(np.array_equal(picture, other) for other in pictures):
                    names.append((kind, colour))
                    pictures.append(picture)
    return names, np.stack(pictures)


def _background(pixels: np.ndarray) -> tuple[tuple[str, str] | None, np.ndarray]:
    """The background most like a clip in most pixels: ``(kind and colour, picture)``; None if none is."""
    names, pictures = _backgrounds()
    few = pixels[:, ::2, 1::2]
    error = np.array([np.minimum(np.abs(few - picture[::2, 1::2]).mean(-1), 40).mean() for picture in pictures])
    best = int(error.argmin())
    return (names[best] if error[best] < 20 else None), pictures[best]


@functools.lru_cache(maxsize=1)
def _outlines() -> tuple[list[tuple[str, int, float]], np.ndarray, np.ndarray]:
    """Every stamp of the world, centred in a canvas: names, pictures [M, side, side], areas [M]."""
    names, pictures = [], []
    for shape in world.SHAPES:
        for radius in _RADII:
            turns = _ANGLES if radius in world.SIZES.values() and shape not in ("circle", "ring") else (0.0,)
            for angle in turns:
                stamp = world.stamp(shape, radius, angle)
                start = (_CANVAS - len(stamp)) // 2
                canvas = np.zeros((_CANVAS, _CANVAS), np.float32)
                canvas[start : start + len(stamp), start : start + len(stamp)] = stamp
                names.append((shape, radius, angle))
                pictures.append(canvas)
    stack = np.stack(pictures)
    return names, stack, stack.sum((1, 2))


def _read_object(colour: str, coverage: np.ndarray) -> ObservedObject:
    """Shape and motion from an object's coverage [F, 64, 64] in 0..1."""
    names, _, _ = _outlines()
    count = len(coverage)
    overlap = np.zeros((count, len(names)))
    centres = np.full((count, len(names), 2), np.nan)
    for t, alpha in enumerate(coverage):
        overlap[t], centres[t] = _compare(alpha)
    by_shape = {shape: np.array([n[0] == shape for n in names]) for shape in world.SHAPES}
    best = {shape: overlap[:, chosen].max(1) for shape, chosen in by_shape.items()}
    shape = max(best, key=lambda name: best[name].mean())
    top = np.max(list(best.values()), 0)
    holds = (best[shape] >= top - 0.03) & (best[shape] >= _SEEN)
    index = np.where(by_shape[shape], overlap, -1).argmax(1)
    path = np.array([[*centres[t, i], names[i][1], names[i][2]] for t, i in enumerate(index)], float)
    path[best[shape] < _SEEN] = np.nan
    certain = shape if holds.sum() >= count - count // 8 else None
    return ObservedObject(colour, certain, _motion(shape, path, overlap), path, best[shape])


def _compare(alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """IoU of one frame's coverage [64, 64] with every outline [M], and the best centres [M, 2] (x, y)."""
    _, outlines, areas = _outlines()
    overlap, centres = np.zeros(len(outlines)), np.full((len(outlines), 2), np.nan)
    area = alpha.sum()
    if area < 16:
        return overlap, centres
    y, x = np.arange(world.SIDE) + 0.5, np.arange(world.SIDE) + 0.5
    cx, cy = round(float((alpha.sum(0) * x).sum() / area)), round(float((alpha.sum(1) * y).sum() / area))
    near = np.flatnonzero((areas > 0.6 * area) & (areas < 1.7 * area))
    if not len(near):
        return overlap, centres
    pad = _CANVAS // 2 + 2
    padded = np.pad(alpha, pad)
    inside = np.pad(np.ones_like(alpha), pad)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            top, left = cy + dy + pad - _CANVAS // 2, cx + dx + pad - _CANVAS // 2
            window = (slice(top, top + _CANVAS), slice(left, left + _CANVAS))
            both = np.minimum(outlines[near], padded[window]).sum((1, 2))
            size = (outlines[near] * inside[window]).sum((1, 2))
            iou = both / (area + size - both)
            better = iou > overlap[near]
            overlap[near[better]] = iou[better]
            centres[near[better]] = cx + dx, cy + dy
    return overlap, centres


@functools.lru_cache(maxsize=8)
def _paths(frames: int) -> list[tuple[str, np.ndarray]]:
    """Every way of moving: name and centres [F, 2], mean taken off."""
    paths = []
    for motion in (*("left", "right", "up", "down"), "diagonal", "circling", "still"):
        for variant in range({"diagonal": 4, "circling": 8}.get(motion, 1)):
            sprite = world.Sprite("circle", "red", "small", motion, 0, 0, variant)
            path = world.trajectory(sprite, frames)[:, :2]
            paths.append((motion, path - path.mean(0)))
    return paths


def _motion(shape: str, path: np.ndarray, overlap: np.ndarray) -> str | None:
    """The motion of a path [F, 4] (see :class:`ObservedObject`); None if it is none of the world's."""
    seen = ~np.isnan(path[:, 0])
    if len(path) < 2 or seen.sum() < len(path) - len(path) // 8:
        return None
    times = np.flatnonzero(seen)
    centres, radius = path[seen, :2], path[seen, 2]
    misfit = []
    for motion, ideal in _paths(len(path)):
        error = np.hypot(*((centres - centres.mean(0)) - (ideal[seen] - ideal[seen].mean(0))).T)
        misfit.append((float(np.sqrt(np.square(error).mean())), float(error.max()), motion))
    rms, worst, motion = min(misfit)
    if rms > 1.8 or worst > 4:
        return None
    slope, _ = np.polyfit(times, radius, 1)
    change = slope * (len(path) - 1)
    if motion != "still":
        return motion if abs(change) <= 3.5 else None
    if abs(change) >= 4.5:
        ramp = np.sign(slope) * times
        residual = (radius - radius.mean()) - (ramp - ramp.mean())
        return ("grows" if slope > 0 else "shrinks") if np.sqrt(np.square(residual).mean()) <= 1.3 else None
    if abs(change) > 2.5:
        return None
    return "spins" if _spins(shape, overlap) else "still"


def _spins(shape: str, overlap: np.ndarray) -> bool:
    """Whether outlines that turn by 15 degrees a frame fit better than those that do not, from first to last."""
    names, _, _ = _outlines()
    turning, resting = np.zeros(len(overlap)), np.zeros(len(overlap))
    for i, (name, _, angle) in enumerate(names):
        if name != shape:
            continue
        for t in range(len(overlap)):
            if angle == _ANGLES[t % len(_ANGLES)]:
                turning[t] = max(turning[t], overlap[t, i])
            if angle == 0:
                resting[t] = max(resting[t], overlap[t, i])
    gain = turning - resting
    half = len(gain) // 2
    return bool(gain[:half].mean() > 0.01 and gain[half:].mean() > 0.01 and gain.mean() > 0.025)

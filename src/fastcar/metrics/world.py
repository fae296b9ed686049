"""What a clip of the captioned world shows, read from its pixels alone, and whether that is what was asked for.

Analysis by synthesis, without learned weights: the background is the best of all the world's backgrounds; objects are
told apart by the palette's colours; in every frame an object's outline is compared with the world's stamps (shape,
radius, angle, place); its motion is the best of the world's paths.

A clip must hold what it shows. With F frames, of which ``F // 8`` may be read wrong (one in a clip of eight):

- an object must be there in every frame; one that vanishes has no colour, shape or motion;
- colour and shape are those that all but ``F // 8`` frames show when each is read by itself;
- places must follow one of the world's paths from first frame to last, at 0.7 to 1.3 times its extent; a clip that
  stops, turns or jumps strays from every path. A diagonal may be any of the four, an orbit may turn either way;
- radii must follow a ramp to grow or shrink, and stay as they are in every other motion;
- angles must turn by 15 degrees a frame, either way, to spin, and rest to stand still; all but ``F // 8`` frames must
  agree.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.ndimage import binary_dilation, gaussian_filter

from fastcar.training import world

__all__ = ["Judgement", "Observation", "ObservedObject", "adherence", "judge", "observe"]

_CONTRAST = 45  # a pixel this far from the background, in any channel, belongs to an object
_PURE = 60  # a pixel this near to a colour of the palette (Euclidean, 0..255) votes for it
_FOREIGN = 45  # a pixel this far from all blends of background and object is neither
_VOTES = 10  # pixels that show a colour; the smallest stamp, a star of radius 5, covers 31
_AREA = 16  # covered pixels below which there is no object
_SEEN = 0.85  # agreement below which a frame shows no known shape
_TIE = 0.015  # agreements so near to one another do not tell angles apart
_SOFTEN = 0.4  # outlines are softened a little (standard deviation, px), half-way to what an autoencoder makes of them
_CANVAS = 36  # side of the window in which outlines are compared
_REACH = 2  # how far, in px, an outline's centre is sought from the centre of mass
_RADII = range(4, 17)
_TURN = 15.0  # degrees per frame of a spin
_SYMMETRY = {"square": 90.0, "triangle": 120.0, "star": 72.0, "cross": 90.0}  # a turn that changes nothing
_ANGLE_STEP = {"square": 15.0, "triangle": 15.0, "star": 6.0, "cross": 15.0}
_NAMES = tuple(world.COLOURS)
_PALETTE = np.array(list(world.COLOURS.values()), np.float32)


@dataclass(frozen=True, eq=False)
class ObservedObject:
    """One object of a clip of F frames; ``None`` where nothing certain can be said.

    Attributes:
        colour, shape, size, motion: in the world's words, by the rules that the module states.
        path: centre x, centre y, radius in pixels and angle in degrees (within the shape's symmetry) of every frame,
            float64 [F, 4]; NaN where there is no object.
        frame_colours, frame_shapes: what each frame shows when read by itself, F each; None where it is unclear.
        agreement: of the clip's shape with every frame, float64 [F] in 0..1; 1 is the world's own stamp.
    """

    colour: str | None
    shape: str | None
    size: str | None
    motion: str | None
    path: np.ndarray
    frame_colours: tuple[str | None, ...]
    frame_shapes: tuple[str | None, ...]
    agreement: np.ndarray


@dataclass(frozen=True, eq=False)
class Observation:
    """What a clip shows: its background (all three None if it is none of the world's) and up to two objects."""

    kind: str | None
    background_colour: str | None
    variant: int | None
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
    """Compare a clip, uint8 [F, 64, 64, 3], with the scene that was asked for.

    Objects are paired with sprites in the order that makes most right. An object too few fails colour, shape and
    motion; one too many fails shape.
    """
    seen = observe(frames)
    kind, tint = seen.kind == scene.kind, seen.background_colour == scene.colour
    wanted, given = scene.sprites, seen.objects
    if len(given) < len(wanted):
        return Judgement(False, False, False, kind, tint)
    verdicts = [
        tuple(
            all(getattr(item, name) == getattr(sprite, name) for item, sprite in zip(chosen, wanted, strict=True))
            for name in ("colour", "shape", "motion")
        )
        for chosen in itertools.permutations(given, len(wanted))
    ]
    colour, shape, motion = max(verdicts, key=sum)
    return Judgement(colour, shape and len(given) == len(wanted), motion, kind, tint)


def observe(frames: np.ndarray) -> Observation:
    """Read a clip, uint8 [F, 64, 64, 3], that shows none, one or two objects.

    Raises:
        ValueError: frames of another shape or dtype, or none at all.
    """
    if frames.dtype != np.uint8 or frames.shape[1:] != (world.SIDE, world.SIDE, 3) or not len(frames):
        raise ValueError(f"frames must be uint8 [F, {world.SIDE}, {world.SIDE}, 3], got {frames.dtype} {frames.shape}")
    pixels = frames.astype(np.float32)
    name, back = _background(pixels)
    objects = tuple(_read_object(*layer) for layer in _layers(pixels, back))
    kind, colour, variant = name or (None, None, None)
    return Observation(kind, colour, variant, objects)


def adherence(judgements: Sequence[Judgement]) -> dict[str, dict[str, float]]:
    """Share of clips that are right in ``colour``, ``shape``, ``motion``, ``background``, its colour, and everything.

    Returns:
        For each: ``mean``; ``low`` and ``high`` of its 95 % Wilson interval; ``n``, the number of clips.
    """
    names = ("colour", "shape", "motion", "background", "background_colour", "everything")
    return {name: _wilson(sum(getattr(j, name) for j in judgements), len(judgements)) for name in names}


def _wilson(right: int, count: int) -> dict[str, float]:
    if not count:
        return {"mean": 0.0, "low": 0.0, "high": 1.0, "n": 0}
    z, p = 1.959964, right / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (p * (1 - p) / count + z * z / (4 * count * count)) ** 0.5
    return {"mean": p, "low": max(0.0, middle - half), "high": min(1.0, middle + half), "n": count}


@functools.lru_cache(maxsize=1)
def _backgrounds() -> tuple[list[tuple[str, str, int]], np.ndarray]:
    names: list[tuple[str, str, int]] = []
    pictures: list[np.ndarray] = []
    for kind, colour, variant in itertools.product(world.KINDS, world.BACKGROUND_COLOURS, range(4)):
        picture = world.background(kind, colour, variant)
        if not any(np.array_equal(picture, other) for other in pictures):
            names.append((kind, colour, variant))
            pictures.append(picture)
    return names, np.stack(pictures)


def _background(pixels: np.ndarray) -> tuple[tuple[str, str, int] | None, np.ndarray]:
    """The background most like a clip: its name, None unless nearly every frame shows it, and its picture."""
    names, pictures = _backgrounds()
    few, third = pixels[:, ::2, 1::2], np.full(3, 1 / 3, np.float32)
    # errors are capped, so that objects, which differ from every background, weigh the same against each
    error = np.stack([np.minimum(np.abs(few - p[::2, 1::2]) @ third, 40).mean((1, 2)) for p in pictures])
    best = int(error.mean(1).argmin())
    holds = (error.argmin(0) == best) & (error[best] < 20)
    return (names[best] if _nearly_all(holds) else None), pictures[best]


def _nearly_all(holds: np.ndarray) -> bool:
    return bool(holds.sum() >= len(holds) - len(holds) // 8)


_Layer = tuple[np.ndarray, np.ndarray, tuple[str | None, ...]]


def _layers(pixels: np.ndarray, back: np.ndarray) -> list[_Layer]:
    """Split clip [F, 64, 64, 3] into objects: each one's coverage and visibility [F, 64, 64] and colour by frame."""
    difference = pixels - back
    outside = np.abs(difference).max(-1) > _CONTRAST
    if outside.sum() < _AREA * len(pixels) / 2:
        return []
    distance = _dot(pixels, pixels)[..., None] - 2 * pixels @ _PALETTE.T + _dot(_PALETTE, _PALETTE)  # squared
    label = np.where(outside & (distance.min(-1) < _PURE**2), distance.argmin(-1), -1)
    votes = np.stack([(label == c).sum((1, 2)) for c in range(len(_PALETTE))], -1)
    first = int(votes.sum(0).argmax())
    # a second object is a colour that the first one's edges do not explain, seen beside it
    _, off_first = _blend(difference, _PALETTE[first] - back)
    others = np.stack([((label == c) & (off_first > _FOREIGN)).sum((1, 2)) for c in range(len(_PALETTE))], -1)
    others[:, first] = 0
    second = int(others.sum(0).argmax())
    beside = (others[:, second] >= _VOTES) & (votes[:, first] >= _VOTES)
    if beside.sum() < len(pixels) / 2:
        tints = [int(v.argmax()) if v.max() >= _VOTES else -1 for v in votes]
        toward = _tint(pixels, label, tints, outside) - back
        return [(_coverage(difference, toward, outside), np.ones(outside.shape, bool), _words(tints))]

    pair = (first, second)
    shades = [_tint(pixels, label, [c] * len(pixels), label == c) - back for c in pair]
    (alpha_a, off_a), (alpha_b, off_b) = (_blend(difference, toward) for toward in shades)
    core = (outside & (alpha_a > 0.5) & (off_a <= off_b), outside & (alpha_b > 0.5) & (off_b < off_a))
    layers = []
    for i, (c, count) in enumerate(zip(pair, (votes[:, first], others[:, second]), strict=True)):
        # what lies at the other object cannot be seen, its blended edges included
        visible = ~binary_dilation(core[1 - i], np.ones((1, 5, 5))) | core[i]
        coverage = np.where(visible, _coverage(difference, shades[i], outside), 0)
        layers.append((coverage, visible, _words([c if n >= _VOTES else -1 for n in count])))
    return layers


def _words(tints: list[int]) -> tuple[str | None, ...]:
    return tuple(_NAMES[c] if c >= 0 else None for c in tints)


def _tint(pixels: np.ndarray, label: np.ndarray, tints: list[int], fallback: np.ndarray) -> np.ndarray:
    """An object's own colour in every frame, [F, 1, 1, 3]: the median of the pixels that vote for its tint."""
    own = np.empty((len(pixels), 1, 1, 3), np.float32)
    for t, tint in enumerate(tints):
        mask = label[t] == tint if tint >= 0 else fallback[t]
        own[t] = np.median(pixels[t][mask], axis=0) if mask.sum() >= _VOTES else _PALETTE[max(tint, 0)]
    return own


def _blend(difference: np.ndarray, toward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How far each pixel went from the background to an object's colour, 0..1, and how far off that line it is."""
    alpha = (_dot(difference, toward) / _dot(toward, toward)).clip(0, 1)
    rest = difference - alpha[..., None] * toward
    return alpha, np.sqrt(_dot(rest, rest))


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("...c,...c->...", a, b)


def _coverage(difference: np.ndarray, toward: np.ndarray, outside: np.ndarray) -> np.ndarray:
    alpha, off = _blend(difference, toward)
    alpha[alpha < 0.25] = 0
    return np.where(outside & (off > _FOREIGN), alpha.clip(0.5), alpha)  # a pixel of an odd colour spoils the outline


@functools.lru_cache(maxsize=1)
def _outlines() -> tuple[list[tuple[str, int, float]], np.ndarray]:
    """Every stamp of the world in a canvas: (shape, radius, angle) of each, and pictures [M, side * side]."""
    turned = [r + d for r in world.SIZES.values() for d in (-1, 0, 1)]  # only shapes of constant size spin
    names, pictures = [], []
    for shape, radius in itertools.product(world.SHAPES, _RADII):
        angles = [0.0]
        if shape in _SYMMETRY and radius in turned:
            angles = np.arange(0, _SYMMETRY[shape], _ANGLE_STEP[shape]).tolist()
        for angle in angles:
            stamp = world.stamp(shape, radius, angle)
            start = (_CANVAS - len(stamp)) // 2
            canvas = np.zeros((_CANVAS, _CANVAS), np.float32)
            canvas[start : start + len(stamp), start : start + len(stamp)] = stamp
            names.append((shape, radius, angle))
            pictures.append(gaussian_filter(canvas, _SOFTEN).ravel())
    return names, np.stack(pictures)


def _compare(coverage: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Agreement of every frame, coverage and visibility [64, 64], with every outline, and the best centres (x, y).

    The agreement of coverage a and outline o is ``ao / (aa + oo - ao)`` (Tanimoto's, an overlap for soft masks), over
    the visible pixels. Coverage beyond the window counts in ``aa``: matter elsewhere spoils the outline too.

    Returns:
        Agreement float64 [F, M] and centres float64 [F, M, 2]; 0 and NaN in frames without an object.
    """
    _, outlines = _outlines()
    pad = _CANVAS // 2 + _REACH
    steps = np.arange(-_REACH, _REACH + 1)
    agreement = np.zeros((len(coverage), len(outlines)))
    centres = np.full((*agreement.shape, 2), np.nan)
    middle = np.arange(world.SIDE) + 0.5
    for t, (alpha, seen) in enumerate(zip(coverage, visible, strict=True)):
        area = alpha.sum()
        if area < _AREA:
            continue
        cx, cy = round(float(alpha.sum(0) @ middle / area)), round(float(alpha.sum(1) @ middle / area))
        top, left = cy + pad - _CANVAS // 2 + steps, cx + pad - _CANVAS // 2 + steps
        there = np.ix_(top, left)
        window = (_CANVAS, _CANVAS)
        a = sliding_window_view(np.pad(alpha, pad), window)[there].reshape(steps.size**2, -1)
        w = sliding_window_view(np.pad(seen, pad), window)[there].reshape(steps.size**2, -1)
        both = a @ outlines.T
        size = np.square(outlines).sum(1) if w.all() else w.astype(np.float32) @ np.square(outlines).T
        score = both / (np.square(alpha).sum() + size - both)
        best = score.argmax(0)
        agreement[t] = score[best, np.arange(len(outlines))]
        centres[t] = np.stack((cx + steps[best % steps.size], cy + steps[best // steps.size]), -1)
    return agreement, centres


def _read_object(coverage: np.ndarray, visible: np.ndarray, colours: tuple[str | None, ...]) -> ObservedObject:
    names, _ = _outlines()
    agreement, centres = _compare(coverage, visible)
    present = agreement.max(1) > 0
    of_shape = {shape: np.array([name[0] == shape for name in names]) for shape in world.SHAPES}
    best = np.stack([agreement[:, of_shape[shape]].max(1) for shape in world.SHAPES])
    frame_shapes = tuple(
        world.SHAPES[i] if value >= _SEEN else None for i, value in zip(best.argmax(0), best.max(0), strict=True)
    )
    likeliest = world.SHAPES[best.sum(1).argmax()]
    index = np.where(of_shape[likeliest], agreement, -1).argmax(1)
    path = np.array([[*centres[t, i], names[i][1], names[i][2]] for t, i in enumerate(index)], float)
    path[~present] = np.nan
    motion = size = None
    if present.all():
        motion = _motion(likeliest, path, agreement)
        # half-way between the sizes; a small object that grows or shrinks has a mean radius of 8.5, a large one 11.5
        size = "small" if path[:, 2].mean() < 10 else "large"
    return ObservedObject(
        _held(colours, present),
        _held(frame_shapes, present),
        size,
        motion,
        path,
        colours,
        frame_shapes,
        best[world.SHAPES.index(likeliest)],
    )


def _held(words: tuple[str | None, ...], present: np.ndarray) -> str | None:
    """The word that nearly all frames agree on, if the object is in all of them."""
    word = Counter(words).most_common(1)[0][0]
    return word if present.all() and _nearly_all(np.array([w == word for w in words])) else None


@functools.lru_cache(maxsize=8)
def _paths(frames: int) -> list[tuple[str, np.ndarray]]:
    """Every way of moving: name and centres [F, 2], mean taken off."""
    paths = []
    for motion in ("left", "right", "up", "down", "diagonal", "circling"):
        for variant in range({"diagonal": 4, "circling": 8}.get(motion, 1)):
            sprite = world.Sprite("circle", "red", "small", motion, 0, 0, variant)
            path = world.trajectory(sprite, frames)[:, :2]
            paths.append((motion, path - path.mean(0)))
            if motion == "circling":
                paths.append((motion, paths[-1][1] * (1, -1)))  # the other way round
    return paths


def _motion(shape: str, path: np.ndarray, agreement: np.ndarray) -> str | None:
    """The motion of a path [F, 4] (see :class:`ObservedObject`); None if it is none of the world's."""
    if len(path) < 2:
        return None
    centres = path[:, :2] - path[:, :2].mean(0)
    growth, off_ramp = _fit(path[:, 2:3], np.arange(len(path))[:, None])
    grown = growth * (len(path) - 1)
    if np.hypot(*(path[:, :2] - np.median(path[:, :2], 0)).T).max() > 2.5:
        fits = [(*_fit(centres, ideal), motion) for motion, ideal in _paths(len(path))]
        near = [(_rms(off), motion) for scale, off, motion in fits if 0.7 <= scale <= 1.3 and off.max() <= 3.5]
        misfit, motion = min(near, default=(np.inf, None))
        return motion if misfit <= 1.5 and abs(grown) <= 3.5 else None
    if 0.7 <= abs(growth) <= 1.3 and _rms(off_ramp) <= 1 and off_ramp.max() <= 2:
        # radii are whole, so that a ramp which ends two frames early strays by little: look at the ends too
        whole = (path[-1, 2] - path[0, 2]) * np.sign(growth) >= 0.8 * (len(path) - 1)
        return ("grows" if growth > 0 else "shrinks") if whole else None
    return _turning(shape, agreement) if abs(grown) <= 2.5 and off_ramp.max() <= 2 else None


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))


def _fit(seen: np.ndarray, ideal: np.ndarray) -> tuple[float, np.ndarray]:
    """Scale of an ideal course [F, D] that comes nearest to the seen one, and how far off the worse axis is, [F]."""
    seen, ideal = seen - seen.mean(0), ideal - ideal.mean(0)
    scale = float((seen * ideal).sum() / np.square(ideal).sum())
    return scale, np.abs(seen - scale * ideal).max(1)


def _turning(shape: str, agreement: np.ndarray) -> str | None:
    """``spins`` or ``still``, whichever agrees better with frames [F, M] and holds in nearly all; else None."""
    if shape not in _SYMMETRY:
        return "still"
    names, _ = _outlines()
    step, times = _ANGLE_STEP[shape], np.arange(len(agreement))
    turns = round(_SYMMETRY[shape] / step)
    by_angle = np.stack(
        [agreement[:, [name[0] == shape and name[2] == turn * step for name in names]].max(1) for turn in range(turns)],
        1,
    )
    options = []
    for rate, start in itertools.product((0, -_TURN, _TURN), range(turns)):
        followed = by_angle[times, np.round(start + rate * times / step).astype(int) % turns]
        holds = _nearly_all(followed >= by_angle.max(1) - _TIE)
        options.append((followed.mean(), holds, "spins" if rate else "still"))
    _, holds, motion = max(options)
    return motion if holds else None

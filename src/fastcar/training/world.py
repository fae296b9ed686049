"""A small captioned world: coloured shapes that move over patterned backgrounds.

Everything lies on coarse grids (positions on 4 px, two sizes, fixed speeds and phases), so that a small
model can learn the world whole, and everything follows from a seed: ``sample(split, seed, index)`` is the
same clip on every machine. What a clip shows is a :class:`Scene`; the caption says it in one of several
phrasings. The split of a scene follows from what its first object is and where it moves, so validation and
test prompts name combinations that training never shows.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

__all__ = [
    "BACKGROUND_COLOURS",
    "COLOURS",
    "FRAMES",
    "KINDS",
    "MOTIONS",
    "SHAPES",
    "SIDE",
    "SIZES",
    "SPLITS",
    "Scene",
    "Sprite",
    "background",
    "caption",
    "render",
    "sample",
    "split_of",
    "stamp",
    "trajectory",
    "vocabulary",
]

SIDE = 64
FRAMES = 8
GRID = 4
STEP = 4

COLOURS = {
    "red": (228, 32, 36),
    "green": (48, 200, 64),
    "blue": (48, 96, 255),
    "yellow": (255, 228, 40),
    "orange": (255, 136, 0),
    "purple": (152, 48, 208),
    "pink": (255, 128, 196),
    "white": (248, 248, 248),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
SIZES = {"small": 8, "large": 13}
MOTIONS = ("left", "right", "up", "down", "diagonal", "circling", "grows", "shrinks", "spins", "still")
KINDS = ("plain", "gradient", "checkered", "striped")
BACKGROUND_COLOURS = {
    "navy": (24, 30, 84),
    "gray": (104, 106, 110),
    "brown": (92, 60, 32),
    "teal": (16, 88, 92),
}
SPLITS = ("train", "validation", "test")

_DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
_DIAGONALS = ((-1, -1), (1, -1), (-1, 1), (1, 1))
_ORBIT = ((12, 0), (8, 8), (0, 12), (-8, 8), (-12, 0), (-8, -8), (0, -12), (8, -8))
_SPIN = 15.0  # degrees per frame
_GROWTH = {"small": 5, "large": 8}  # smallest radius of a shape that grows or shrinks by 1 px per frame


@dataclass(frozen=True)
class Sprite:
    """One object: what it is and the path it takes. ``x, y`` is the centre in the first frame, in pixels."""

    shape: str
    colour: str
    size: str
    motion: str
    x: int
    y: int
    variant: int = 0  # which diagonal, or which phase of the orbit


@dataclass(frozen=True)
class Scene:
    """What a clip shows: a background (kind, colour, direction of its pattern) and one or two sprites."""

    kind: str
    colour: str
    variant: int
    sprites: tuple[Sprite, ...]


def trajectory(sprite: Sprite, frames: int = FRAMES) -> np.ndarray:
    """Centre x, centre y, radius (px) and angle (degrees) of a sprite in every frame: float64 [frames, 4]."""
    path = np.empty((frames, 4))
    radius = SIZES[sprite.size]
    for t in range(frames):
        x, y, r, angle = sprite.x, sprite.y, radius, 0.0
        if sprite.motion in _DIRECTIONS:
            dx, dy = _DIRECTIONS[sprite.motion]
            x, y = x + STEP * t * dx, y + STEP * t * dy
        elif sprite.motion == "diagonal":
            dx, dy = _DIAGONALS[sprite.variant]
            x, y = x + STEP * t * dx, y + STEP * t * dy
        elif sprite.motion == "circling":
            here, start = _ORBIT[(sprite.variant + t) % 8], _ORBIT[sprite.variant]
            x, y = x + here[0] - start[0], y + here[1] - start[1]
        elif sprite.motion == "grows":
            r = _GROWTH[sprite.size] + t
        elif sprite.motion == "shrinks":
            r = _GROWTH[sprite.size] + FRAMES - 1 - t
        elif sprite.motion == "spins":
            angle = _SPIN * t
        path[t] = x, y, max(r, 2), angle
    return path


@functools.lru_cache(maxsize=4096)
def stamp(shape: str, radius: int, angle: float = 0.0) -> np.ndarray:
    """Coverage of a shape centred in a square of side ``2 * radius + 2``: float32 [side, side] in 0..1."""
    scale = 8
    side = 2 * radius + 2
    image = Image.new("L", (side * scale, side * scale))
    draw = ImageDraw.Draw(image)
    centre, r = side * scale / 2, radius * scale

    def polygon(points: list[tuple[float, float]]) -> None:
        a = math.radians(angle)
        turned = [
            (centre + r * (x * math.cos(a) - y * math.sin(a)), centre + r * (x * math.sin(a) + y * math.cos(a)))
            for x, y in points
        ]
        draw.polygon(turned, fill=255)

    def disc(size: float, fill: int) -> None:
        draw.ellipse((centre - size, centre - size, centre + size, centre + size), fill=fill)

    if shape == "circle":
        disc(r, 255)
    elif shape == "ring":
        disc(r, 255)
        disc(r * 0.55, 0)
    elif shape == "square":
        c = 0.84
        polygon([(-c, -c), (c, -c), (c, c), (-c, c)])
    elif shape == "triangle":
        polygon([(math.sin(k * 2 * math.pi / 3), -math.cos(k * 2 * math.pi / 3)) for k in range(3)])
    elif shape == "star":
        radii = (1.0, 0.42)
        polygon(
            [(radii[k % 2] * math.sin(k * math.pi / 5), -radii[k % 2] * math.cos(k * math.pi / 5)) for k in range(10)]
        )
    elif shape == "cross":
        w = 0.34
        polygon([(-w, -1), (w, -1), (w, 1), (-w, 1)])
        polygon([(-1, -w), (1, -w), (1, w), (-1, w)])
    else:
        raise ValueError(f"unknown shape {shape!r}; expected one of {', '.join(SHAPES)}")
    coverage = np.asarray(image, dtype=np.float32) / 255
    coverage = coverage.reshape(side, scale, side, scale).mean((1, 3))
    coverage.setflags(write=False)
    return coverage


@functools.lru_cache(maxsize=256)
def background(kind: str, colour: str, variant: int) -> np.ndarray:
    """A background as float32 [64, 64, 3] in 0..255. ``variant`` (0..3) turns gradients and stripes."""
    base = np.array(BACKGROUND_COLOURS[colour], dtype=np.float32)
    light = base + (255 - base) * 0.35
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    if kind == "plain":
        weight = np.zeros((SIDE, SIDE), np.float32)
    elif kind == "gradient":
        weight = (x, SIDE - 1 - x, y, SIDE - 1 - y)[variant] / (SIDE - 1)
    elif kind == "checkered":
        weight = ((x // 16 + y // 16 + variant) % 2).astype(np.float32)
    elif kind == "striped":
        weight = (((y, x)[variant % 2] // 8 + variant // 2) % 2).astype(np.float32)
    else:
        raise ValueError(f"unknown background kind {kind!r}; expected one of {', '.join(KINDS)}")
    picture = base + weight[..., None] * (light - base)
    picture.setflags(write=False)
    return picture


def render(scene: Scene, frames: int = FRAMES) -> np.ndarray:
    """A scene as uint8 [frames, 64, 64, 3]; later sprites lie over earlier ones."""
    clip = np.repeat(background(scene.kind, scene.colour, scene.variant)[None], frames, 0)
    for sprite in scene.sprites:
        colour = np.array(COLOURS[sprite.colour], dtype=np.float32)
        for frame, (x, y, r, angle) in zip(clip, trajectory(sprite, frames), strict=True):
            alpha = stamp(sprite.shape, int(r), float(angle))
            half = alpha.shape[0] // 2
            top, left = int(y) - half, int(x) - half
            y0, x0 = max(top, 0), max(left, 0)
            y1, x1 = min(top + 2 * half, SIDE), min(left + 2 * half, SIDE)
            if y0 >= y1 or x0 >= x1:
                continue
            a = alpha[y0 - top : y1 - top, x0 - left : x1 - left, None]
            frame[y0:y1, x0:x1] += a * (colour - frame[y0:y1, x0:x1])
    return np.clip(clip + 0.5, 0, 255).astype(np.uint8)


def split_of(scene: Scene) -> str:
    """The split a scene belongs to, by its background and its first sprite: 90 % train, 5 % each other."""
    first = scene.sprites[0]
    key = "|".join((first.shape, first.colour, first.motion, scene.kind, scene.colour))
    bucket = hashlib.sha256(key.encode()).digest()[0] % 20
    return {0: "validation", 1: "test"}.get(bucket, "train")


def sample(
    split: str = "train", seed: int = 0, index: int = 0, objects: int | None = None, frames: int = FRAMES
) -> tuple[Scene, str]:
    """The scene and caption number ``index`` of a split. ``objects=None``: one object, two in a tenth of all clips.

    Raises:
        ValueError: ``split`` is not one of ``SPLITS``, or more objects than find room.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    if objects not in (None, 1, 2):
        raise ValueError(f"objects must be 1, 2 or None, got {objects!r}")
    rng = np.random.default_rng([SPLITS.index(split), seed, index])
    count = objects if objects is not None else (2 if rng.random() < 0.1 else 1)
    while True:
        sprites: list[Sprite] = []
        while len(sprites) < count:
            sprite = _random_sprite(rng, frames)
            if all(_apart(sprite, other, frames) for other in sprites):
                sprites.append(sprite)
        scene = Scene(
            kind=KINDS[rng.integers(len(KINDS))],
            colour=list(BACKGROUND_COLOURS)[rng.integers(len(BACKGROUND_COLOURS))],
            variant=int(rng.integers(4)),
            sprites=tuple(sprites),
        )
        if split_of(scene) == split:
            return scene, caption(scene, rng)


def _random_sprite(rng: np.random.Generator, frames: int) -> Sprite:
    while True:
        shape = SHAPES[rng.integers(len(SHAPES))]
        motion = MOTIONS[rng.integers(len(MOTIONS))]
        if motion == "spins" and shape in ("circle", "ring"):
            continue  # nobody could see it
        size = list(SIZES)[rng.integers(2)]
        colour = list(COLOURS)[rng.integers(len(COLOURS))]
        variant = int(rng.integers(8)) if motion == "circling" else int(rng.integers(4)) if motion == "diagonal" else 0
        at = Sprite(shape, colour, size, motion, 0, 0, variant)
        path = trajectory(at, min(frames, FRAMES))
        reach = path[:, 2].max()
        low = np.ceil((reach - path[:, :2].min(0)) / GRID)
        high = np.floor((SIDE - reach - path[:, :2].max(0)) / GRID)
        if (low > high).any():
            low = high = np.round((low + high) / 2)
        if motion == "circling":  # around the frame's centre, so that the first frame tells how the second goes on
            x, y = (SIDE // 2 + offset for offset in _ORBIT[variant])
        else:
            x, y = (GRID * rng.integers(low, high + 1)).tolist()
        return Sprite(shape, colour, size, motion, x, y, variant)


def _apart(a: Sprite, b: Sprite, frames: int) -> bool:
    """Two sprites are told apart by colour and shape, and never cover one another's centre."""
    if a.colour == b.colour or a.shape == b.shape:
        return False
    pa, pb = trajectory(a, frames), trajectory(b, frames)
    distance = np.hypot(*(pa[:, :2] - pb[:, :2]).T)
    return bool((distance > 0.8 * (pa[:, 2] + pb[:, 2])).all())


_VERBS = {
    "left": ("moving left", "moves left", "sliding left"),
    "right": ("moving right", "moves right", "sliding right"),
    "up": ("moving up", "moves up", "rising"),
    "down": ("moving down", "moves down", "falling"),
    "diagonal": ("moving diagonally", "moves diagonally"),
    "circling": ("circling", "moving in a circle", "circles around"),
    "grows": ("growing", "grows", "getting bigger"),
    "shrinks": ("shrinking", "shrinks", "getting smaller"),
    "spins": ("spinning", "spins", "rotating"),
    "still": ("standing still", "stands still", "resting"),
}


def caption(scene: Scene, rng: np.random.Generator | None = None, full: bool = False) -> str:
    """A caption of a scene in a random phrasing; ``full`` says everything in the plainest one."""
    rng = rng or np.random.default_rng(0)

    def one(options: tuple[str, ...]) -> str:
        return options[0] if full else options[rng.integers(len(options))]

    things = []
    for sprite in scene.sprites:
        size = f"{sprite.size} " if full or rng.random() < 0.7 else ""
        things.append((f"a {size}{sprite.colour} {sprite.shape}", one(_VERBS[sprite.motion])))
    if len(things) == 1 and not full and rng.random() < 0.1:
        thing, verb = things[0]
        subject = f"{verb} {thing[2:]}" if verb.endswith("ing") and " " not in verb else f"{thing} {verb}"
        subject = f"a {subject}" if not subject.startswith("a ") else subject
    else:
        subject = " and ".join(f"{thing} {verb}" for thing, verb in things)
    if not full and rng.random() < 0.12:
        return subject
    place = f"a {scene.kind} {scene.colour} background"
    if not full and rng.random() < 0.2:
        return f"on {place} {subject}"
    return f"{subject} {one(('over', 'on', 'in front of'))} {place}"


def vocabulary() -> list[str]:
    """Every word that captions use, sorted."""
    words = {"a", "and", "over", "on", "in", "front", "of", "background"}
    words.update(COLOURS, SHAPES, SIZES, KINDS, BACKGROUND_COLOURS)
    words.update(word for verbs in _VERBS.values() for verb in verbs for word in verb.split())
    return sorted(words)

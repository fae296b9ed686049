import hashlib
import itertools
import subprocess
import sys

import numpy as np
import pytest

from fastcar.training import world
from fastcar.training.world import COLOURS, FRAMES, KINDS, MOTIONS, SHAPES, SIDE, SIZES, SPLITS, Scene, Sprite

SCENES = [(split, seed, index) for split in SPLITS for seed in (0, 1) for index in range(150)]


def digest():
    sha = hashlib.sha256()
    for split, seed, index in SCENES[::50]:
        scene, caption = world.sample(split, seed, index)
        sha.update(world.render(scene).tobytes() + caption.encode())
    return sha.hexdigest()


def test_a_number_is_the_same_clip_in_every_process():
    code = "import sys; sys.path.insert(0, sys.argv[1]); from test_world import digest; print(digest())"
    folder = __file__.rpartition("/")[0]
    run = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == digest()


def test_numbers_seeds_and_splits_give_different_clips():
    assert len({world.sample(*key) for key in SCENES}) > 0.99 * len(SCENES)


def test_splits_are_disjoint_in_what_a_clip_shows():
    seen = {split: set() for split in SPLITS}
    for split, seed, index in SCENES:
        scene, _ = world.sample(split, seed, index)
        assert world.split_of(scene) == split
        first = scene.sprites[0]
        seen[split].add((first.shape, first.colour, first.motion, scene.kind, scene.colour))
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]


def test_the_split_does_not_hang_on_what_a_caption_need_not_say():
    sprite = Sprite("star", "red", "small", "left", 48, 32)
    splits = {
        world.split_of(Scene("plain", "navy", variant, (Sprite("star", "red", size, "left", x, 32), *more)))
        for variant in range(4)
        for size in SIZES
        for x in (44, 48)
        for more in ((), (sprite,))
    }
    assert len(splits) == 1


def test_shares_of_splits():
    counts = dict.fromkeys(SPLITS, 0)
    for shape in SHAPES:
        for colour in COLOURS:
            for motion in MOTIONS:
                for kind in KINDS:
                    counts[world.split_of(Scene(kind, "teal", 0, (Sprite(shape, colour, "small", motion, 0, 0),)))] += 1
    total = sum(counts.values())
    assert counts["train"] / total == pytest.approx(0.9, abs=0.02)
    assert counts["validation"] / total == pytest.approx(0.05, abs=0.015)


def test_unknown_split():
    with pytest.raises(ValueError, match="unknown split 'all'; expected one of train, validation, test"):
        world.sample("all")


def test_captions_keep_to_the_vocabulary():
    words = world.vocabulary()
    assert words == sorted(set(words))
    used = {word for key in SCENES for word in world.sample(*key)[1].split()}
    assert used <= set(words)
    assert len(used) > 0.9 * len(words)


def test_captions_say_what_is_there():
    for key in SCENES:
        scene, caption = world.sample(*key)
        said = f" {caption} "
        for sprite in scene.sprites:
            assert f" {sprite.colour} {sprite.shape} " in said
            assert sum(f" {verb} " in said for verb in world._VERBS[sprite.motion]) >= 1
        assert (" background " in said) == (f" a {scene.kind} {scene.colour} background " in said)


def test_full_captions():
    star = Sprite("star", "yellow", "large", "left", 48, 32)
    ring = Sprite("ring", "blue", "small", "still", 16, 32)
    assert (
        world.caption(Scene("gradient", "navy", 0, (star,)), full=True)
        == "a large yellow star moving left over a gradient navy background"
    )
    assert (
        world.caption(Scene("plain", "teal", 0, (star, ring)), full=True)
        == "a large yellow star moving left and a small blue ring standing still over a plain teal background"
    )


def test_objects_stay_inside_the_picture_or_are_centred():
    for key in SCENES:
        for sprite in world.sample(*key)[0].sprites:
            x, y, r, _ = world.trajectory(sprite).T
            for centre, extent in ((x, r), (y, r)):
                over = max((extent - centre).max(), (centre + extent - SIDE).max())
                assert over <= 2, (key, sprite)  # none by more than a grid step's half
            assert x.min() > 0 and x.max() < SIDE and y.min() > 0 and y.max() < SIDE
            assert sprite.x % world.GRID == 0 and sprite.y % world.GRID == 0
            assert not (sprite.motion == "spins" and sprite.shape in ("circle", "ring"))


def test_two_objects_are_told_apart():
    for index in range(60):
        a, b = world.sample("train", 0, index, objects=2)[0].sprites
        assert a.colour != b.colour
        assert a.shape != b.shape
        pa, pb = world.trajectory(a), world.trajectory(b)
        distance = np.hypot(pa[:, 0] - pb[:, 0], pa[:, 1] - pb[:, 1])
        assert (distance > 0.8 * (pa[:, 2] + pb[:, 2])).all()


def test_one_object_in_most_clips():
    counts = [len(world.sample("train", 0, index)[0].sprites) for index in range(600)]
    assert set(counts) == {1, 2}
    assert counts.count(2) / 600 == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize(
    ("motion", "variant", "first", "second", "last"),
    [
        ("left", 0, (32, 32, 8, 0), (28, 32, 8, 0), (4, 32, 8, 0)),
        ("right", 0, (32, 32, 8, 0), (36, 32, 8, 0), (60, 32, 8, 0)),
        ("up", 0, (32, 32, 8, 0), (32, 28, 8, 0), (32, 4, 8, 0)),
        ("down", 0, (32, 32, 8, 0), (32, 36, 8, 0), (32, 60, 8, 0)),
        ("diagonal", 0, (32, 32, 8, 0), (28, 28, 8, 0), (4, 4, 8, 0)),
        ("diagonal", 1, (32, 32, 8, 0), (36, 28, 8, 0), (60, 4, 8, 0)),
        ("diagonal", 2, (32, 32, 8, 0), (28, 36, 8, 0), (4, 60, 8, 0)),
        ("diagonal", 3, (32, 32, 8, 0), (36, 36, 8, 0), (60, 60, 8, 0)),
        ("circling", 0, (32, 32, 8, 0), (28, 40, 8, 0), (28, 24, 8, 0)),
        ("circling", 4, (32, 32, 8, 0), (36, 24, 8, 0), (36, 40, 8, 0)),
        ("grows", 0, (32, 32, 5, 0), (32, 32, 6, 0), (32, 32, 12, 0)),
        ("shrinks", 0, (32, 32, 12, 0), (32, 32, 11, 0), (32, 32, 5, 0)),
        ("spins", 0, (32, 32, 8, 0), (32, 32, 8, 15), (32, 32, 8, 105)),
        ("still", 0, (32, 32, 8, 0), (32, 32, 8, 0), (32, 32, 8, 0)),
    ],
)
def test_trajectories_by_hand(motion, variant, first, second, last):
    path = world.trajectory(Sprite("star", "red", "small", motion, 32, 32, variant))
    assert path.shape == (8, 4) and path.dtype == np.float64
    assert [tuple(path[t]) for t in (0, 1, 7)] == [first, second, last]


def test_orbits_are_around_the_centre_so_that_the_first_frame_tells_the_second():
    orbits = [world.sample("train", 0, i, objects=1)[0].sprites[0] for i in range(400)]
    orbits = [sprite for sprite in orbits if sprite.motion == "circling"]
    paths = np.stack([world.trajectory(sprite)[:, :2] for sprite in orbits])
    assert np.allclose(paths.mean(1), SIDE / 2)
    assert len(np.unique(paths[:, 0], axis=0)) == 8


def test_longer_clips_go_on():
    path = world.trajectory(Sprite("star", "red", "large", "circling", 32, 32, 3), frames=17)
    assert np.array_equal(path[:8], path[8:16])
    assert np.array_equal(path[0], path[16])
    shrinking = world.trajectory(Sprite("star", "red", "small", "shrinks", 32, 32), frames=16)
    assert shrinking[:, 2].tolist() == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 2, 2, 2, 2, 2]  # never vanishes
    scene = world.sample("train", 0, 0, frames=12)[0]
    assert world.render(scene, 12).shape == (12, SIDE, SIDE, 3)


def test_render_of_a_square_by_hand():
    clip = world.render(Scene("plain", "navy", 0, (Sprite("square", "red", "small", "right", 20, 24),)))
    assert clip.shape == (FRAMES, SIDE, SIDE, 3) and clip.dtype == np.uint8
    navy, red = (24, 30, 84), (228, 32, 36)
    for t in range(FRAMES):
        x, y = 20 + 4 * t, 24
        for dx, dy in ((0, 0), (-6, -6), (5, -6), (-6, 5), (5, 5)):  # the half side is 0.84 * 8 = 6.72
            assert tuple(clip[t, y + dy, x + dx]) == red
        for dx, dy in ((-8, 0), (7, 0), (0, -8), (0, 7)):
            assert tuple(clip[t, y + dy, x + dx]) == navy
        edge = clip[t, y, x + 6].astype(int)  # covered to about 0.72
        assert 0.65 < (edge[0] - navy[0]) / (red[0] - navy[0]) < 0.85
        assert tuple(clip[t, 2, 2]) == navy


def test_render_of_a_ring_shows_the_background_through_its_hole():
    clip = world.render(Scene("plain", "gray", 0, (Sprite("ring", "white", "large", "still", 32, 32),)))
    assert tuple(clip[0, 32, 32]) == (104, 106, 110)
    assert tuple(clip[0, 32, 32 + 10]) == (248, 248, 248)
    assert tuple(clip[0, 32, 32 + 14]) == (104, 106, 110)


def test_later_sprites_lie_over_earlier_ones():
    sprites = (Sprite("square", "red", "large", "still", 32, 32), Sprite("circle", "blue", "small", "still", 36, 32))
    clip = world.render(Scene("plain", "navy", 0, sprites))
    assert tuple(clip[0, 32, 36]) == (48, 96, 255)
    assert tuple(clip[0, 32, 24]) == (228, 32, 36)


def test_an_object_that_leaves_is_cut_off():
    clip = world.render(Scene("plain", "navy", 0, (Sprite("square", "red", "small", "left", 4, 32),)))
    assert tuple(clip[0, 32, 0]) == (228, 32, 36)
    assert (clip[7] == (24, 30, 84)).all()


def test_still_is_still_and_all_else_moves():
    for motion in MOTIONS:
        clip = world.render(Scene("striped", "teal", 0, (Sprite("star", "pink", "large", motion, 32, 32),)))
        changed = [(a != b).any() for a, b in itertools.pairwise(clip)]
        assert changed == [motion != "still"] * 7


def test_backgrounds_by_hand():
    base = np.array((24, 30, 84), np.float32)
    light = base + (255 - base) * 0.35
    assert (world.background("plain", "navy", 0) == base).all()
    ramps = [world.background("gradient", "navy", variant) for variant in range(4)]
    corners = [[bool(np.allclose(r[y, x], light)) for y, x in ((0, 0), (0, 63), (63, 0), (63, 63))] for r in ramps]
    assert corners == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0]]
    np.testing.assert_allclose(ramps[0][5, 21], base + (light - base) / 3, rtol=1e-5)
    checkered = world.background("checkered", "navy", 0)
    assert np.allclose(checkered[15, 15], base)
    assert np.allclose(checkered[15, 16], light)
    assert np.allclose(checkered[16, 16], base)
    assert np.allclose(world.background("checkered", "navy", 1)[15, 15], light)
    across, upright = (world.background("striped", "navy", variant) for variant in (0, 1))
    assert np.allclose(across[:8], base)
    assert np.allclose(across[8:16], light)
    assert np.array_equal(upright, across.transpose(1, 0, 2))
    with pytest.raises(ValueError, match="unknown background kind 'dotted'; expected one of plain"):
        world.background("dotted", "navy", 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_stamps(shape):
    stamp = world.stamp(shape, 13)
    assert stamp.shape == (28, 28) and stamp.dtype == np.float32
    assert stamp.min() == 0
    assert stamp.max() == 1
    areas = {
        "circle": np.pi,
        "square": 4 * 0.84**2,
        "triangle": 3 * 3**0.5 / 4,
        "star": 10 * 0.42 * np.sin(np.pi / 5) / 2,
        "cross": 8 * 0.34 - 4 * 0.34**2,
        "ring": np.pi * (1 - 0.55**2),
    }
    assert stamp.sum() == pytest.approx(areas[shape] * 13**2, rel=0.03)
    with pytest.raises(ValueError, match="read-only"):
        stamp[0, 0] = 1


def test_a_stamp_turns():
    quarter = world.stamp("triangle", 13, 90)
    assert np.abs(quarter - np.rot90(world.stamp("triangle", 13), -1)).mean() < 0.02
    with pytest.raises(ValueError, match="unknown shape 'hexagon'; expected one of circle"):
        world.stamp("hexagon", 8)

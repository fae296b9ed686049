"""The measuring measured: on rendered truth, on degraded truth, and on clips that are wrong in one way each."""

import dataclasses

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from fastcar.metrics.world import adherence, judge, observe
from fastcar.training import world
from fastcar.training.world import Scene, Sprite

SCENES = [world.sample("test", 0, i, objects=1)[0] for i in range(300)]
SCENE = Scene("checkered", "navy", 0, (Sprite("star", "yellow", "large", "left", 48, 32),))


def scene(**changes):
    return dataclasses.replace(SCENE, sprites=(dataclasses.replace(SCENE.sprites[0], **changes),))


def shares(judgements):
    return {name: value["mean"] for name, value in adherence(judgements).items()}


def degraded(frames, seed):
    """Blur, noise and a tint, as an autoencoder might leave them."""
    noise = np.random.default_rng(seed).normal(0, 6, frames.shape)
    soft = gaussian_filter(frames.astype(float), (0, 0.7, 0.7, 0)) + noise + np.array([5, -4, 3])
    return soft.clip(0, 255).astype(np.uint8)


def test_rendered_truth_is_read_right():
    got = shares([judge(world.render(s), s) for s in SCENES])
    assert min(got.values()) >= 0.97, got


def test_degraded_truth_is_read_right():
    got = shares([judge(degraded(world.render(s), i), s) for i, s in enumerate(SCENES[:100])])
    assert min(got.values()) >= 0.95, got


def test_two_objects_are_read_right():
    scenes = [world.sample("test", 1, i, objects=2)[0] for i in range(60)]
    got = shares([judge(world.render(s), s) for s in scenes])
    assert min(got.values()) >= 0.95, got
    got = shares([judge(degraded(world.render(s), i), s) for i, s in enumerate(scenes[:25])])
    assert min(got.values()) >= 0.95, got


def test_sizes_and_paths_are_read_right():
    for wanted in SCENES[:30]:
        (seen,) = observe(world.render(wanted)).objects
        assert seen.size == wanted.sprites[0].size
        np.testing.assert_allclose(seen.path[:, :3], world.trajectory(wanted.sprites[0])[:, :3], atol=1)


def test_an_object_off_the_grid_is_read_right():
    asked = scene(x=50, y=29)
    assert judge(world.render(asked), asked).everything


def test_every_shape_motion_and_kind_by_name():
    for shape in world.SHAPES:
        assert observe(world.render(scene(shape=shape))).objects[0].shape == shape
    for motion in world.MOTIONS:
        assert observe(world.render(scene(motion=motion, x=32))).objects[0].motion == motion
    for kind in world.KINDS:
        seen = observe(world.render(dataclasses.replace(SCENE, kind=kind)))
        assert (seen.kind, seen.background_colour, seen.variant) == (kind, "navy", 0)


@pytest.mark.parametrize("motion", [m for m in world.MOTIONS if m != "still"])
def test_a_frozen_clip_does_not_move(motion):
    asked = scene(motion=motion, x=32)
    frozen = np.repeat(world.render(asked)[:1], 8, 0)
    assert observe(frozen).objects[0].motion == "still"
    assert not judge(frozen, asked).motion and judge(frozen, asked).shape


@pytest.mark.parametrize("motion", [m for m in world.MOTIONS if m != "still"])
def test_a_clip_that_stops_half_way_does_not_move_right(motion):
    asked = scene(motion=motion, x=32)
    frames = world.render(asked)
    frames[4:] = frames[3]
    assert not judge(frames, asked).motion


@pytest.mark.parametrize("motion", [m for m in world.MOTIONS if m not in ("still", "spins")])
def test_most_of_the_way_is_not_the_way(motion):
    asked = scene(motion=motion, x=32)
    frames = world.render(asked)
    assert judge(np.concatenate([frames[:7], frames[6:7]]), asked).motion == (motion != "circling")
    assert not judge(np.concatenate([frames[:6], frames[5:6], frames[5:6]]), asked).motion
    assert not judge(np.concatenate([frames[[0, 2, 4, 6]], frames[[6, 6, 6, 6]]]), asked).motion
    if motion != "circling":
        assert not judge(np.concatenate([frames[:4], frames[3::-1]]), asked).motion


@pytest.mark.parametrize("motion", ["left", "right", "up", "down", "grows", "shrinks"])
def test_a_clip_played_backwards_moves_wrong(motion):
    asked = scene(motion=motion, x=32)
    assert not judge(world.render(asked)[::-1].copy(), asked).motion


@pytest.mark.parametrize("shape", ["square", "triangle", "star", "cross"])
@pytest.mark.parametrize("size", list(world.SIZES))
def test_spinning_is_told_from_resting(shape, size):
    still, spins = (scene(shape=shape, size=size, motion=motion, x=32) for motion in ("still", "spins"))
    assert judge(world.render(still), still).motion and not judge(world.render(spins), still).motion
    assert judge(world.render(spins), spins).motion and not judge(world.render(still), spins).motion
    assert judge(world.render(spins), spins).shape


def test_one_wrong_thing_is_one_wrong_thing():
    frames = world.render(SCENE)
    judged = judge(frames, scene(colour="red"))
    assert not judged.colour and judged.shape and judged.motion and judged.background
    judged = judge(frames, scene(shape="circle"))
    assert not judged.shape and judged.colour and judged.motion
    judged = judge(frames, dataclasses.replace(SCENE, kind="plain"))
    assert not judged.background and judged.background_colour and judged.shape
    judged = judge(frames, dataclasses.replace(SCENE, colour="teal"))
    assert not judged.background_colour and judged.background


def test_a_shape_must_last():
    frames = world.render(SCENE)
    changing = frames.copy()
    changing[4:] = world.render(scene(shape="square"))[4:]
    assert not judge(changing, SCENE).shape
    late = frames.copy()
    late[6:] = world.render(scene(shape="square"))[6:]
    assert not judge(late, SCENE).shape


@pytest.mark.parametrize("first", [4, 6, 7])
def test_an_object_must_last(first):
    frames = world.render(SCENE)
    frames[first:] = world.background("checkered", "navy", 0)
    judged = judge(frames, SCENE)
    assert not (judged.colour or judged.shape or judged.motion) and judged.background


def test_a_shape_that_melts_is_lost():
    frames = world.render(SCENE)
    melted = frames.copy()
    melted[4:] = gaussian_filter(frames.astype(float), (0, 3, 3, 0))[4:].astype(np.uint8)
    assert not judge(melted, SCENE).shape


def test_a_colour_must_last():
    frames = world.render(SCENE)
    frames[4:] = world.render(scene(colour="blue"))[4:]
    judged = judge(frames, SCENE)
    assert not judged.colour and judged.shape and judged.motion


def test_a_background_must_last():
    frames = world.render(SCENE)
    frames[4:] = world.render(dataclasses.replace(SCENE, kind="plain"))[4:]
    assert not judge(frames, SCENE).background


def test_the_number_of_objects_counts():
    two = dataclasses.replace(SCENE, sprites=(*SCENE.sprites, Sprite("ring", "red", "small", "right", 12, 12)))
    assert len(observe(world.render(two)).objects) == 2 and judge(world.render(two), two).everything
    judged = judge(world.render(SCENE), two)
    assert not (judged.colour or judged.shape or judged.motion) and judged.background
    judged = judge(world.render(two), SCENE)
    assert not judged.shape and judged.colour and judged.motion


def test_both_objects_must_be_right():
    first, second = Sprite("star", "yellow", "large", "left", 48, 40), Sprite("ring", "red", "small", "right", 12, 12)
    asked = dataclasses.replace(SCENE, sprites=(first, second))
    assert judge(world.render(dataclasses.replace(asked, sprites=(second, first))), asked).everything
    for wrong, name in (
        ({"colour": "green"}, "colour"),
        ({"shape": "cross"}, "shape"),
        ({"motion": "still"}, "motion"),
    ):
        shown = dataclasses.replace(asked, sprites=(first, dataclasses.replace(second, **wrong)))
        judged = judge(world.render(shown), asked)
        assert [n for n in ("colour", "shape", "motion") if not getattr(judged, n)] == [name]


def test_an_empty_clip_shows_its_background_alone():
    empty = np.repeat(world.background("checkered", "navy", 0)[None], 8, 0).astype(np.uint8)
    judged = judge(empty, SCENE)
    assert judged.background and not (judged.colour or judged.shape or judged.motion)


def test_noise_shows_nothing():
    judged = judge(np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), dtype=np.uint8), SCENE)
    assert not (judged.shape or judged.motion or judged.background)


def test_wilson_interval():
    yes, no = judge(world.render(SCENE), SCENE), judge(world.render(SCENE)[::-1].copy(), SCENE)
    got = adherence([yes] * 8 + [no] * 2)["motion"]
    assert got["n"] == 10
    # known values of the Wilson interval for 8 of 10
    assert (got["mean"], got["low"], got["high"]) == pytest.approx((0.8, 0.490, 0.943), abs=1e-3)


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="64"):
        observe(np.zeros((8, 32, 32, 3), np.uint8))

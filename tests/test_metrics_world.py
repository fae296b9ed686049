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
    got = shares([judge(degraded(world.render(s), i), s) for i, s in enumerate(SCENES[:120])])
    assert min(got.values()) >= 0.95, got


def test_two_objects_are_read_right():
    scenes = [world.sample("test", 1, i, objects=2)[0] for i in range(80)]
    got = shares([judge(world.render(s), s) for s in scenes])
    assert min(got.values()) >= 0.95, got


def test_every_shape_motion_and_kind_by_name():
    for shape in world.SHAPES:
        assert observe(world.render(scene(shape=shape))).objects[0].shape == shape
    for motion in world.MOTIONS:
        assert observe(world.render(scene(motion=motion, x=32))).objects[0].motion == motion
    for kind in world.KINDS:
        seen = observe(world.render(dataclasses.replace(SCENE, kind=kind)))
        assert (seen.kind, seen.background_colour) == (kind, "navy")


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
    vanishing = frames.copy()
    vanishing[6:] = world.background("checkered", "navy", 0)
    judged = judge(vanishing, SCENE)
    assert not judged.shape and not judged.motion and judged.background


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
    # known values of the Wilson interval for 8 of 10
    assert (got["mean"], got["low"], got["high"]) == pytest.approx((0.8, 0.490, 0.943), abs=1e-3)


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="64"):
        observe(np.zeros((8, 32, 32, 3), np.uint8))

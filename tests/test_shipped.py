"""The model that comes with the package."""

import json

import pytest

import fastcar
from fastcar.metrics.world import judge
from fastcar.models.registry import shipped_path
from fastcar.training.world import Scene, Sprite

PROMPT = "a large yellow star moving left over a gradient navy background"


@pytest.fixture(scope="module")
def mini():
    return fastcar.load("mini")


def test_it_is_small_and_whole():
    folder = shipped_path("mini")
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 20e6
    assert len(json.loads((folder / "config.json").read_text())["sha256"]) == 64


def test_it_has_the_shape_of_real_models(mini):
    config = mini.model.decoder.config
    assert config.layers >= 6 and config.hidden_size >= 256
    assert config.mlp_weights / (config.mlp_weights + config.attention_weights) >= 2 / 3
    geometry = mini.model.geometry(8)
    assert geometry.tokens_per_frame == 64


def test_it_shows_what_it_is_asked_for(mini):
    clip = mini(PROMPT, seed=0)
    scene = Scene("gradient", "navy", 0, (Sprite("star", "yellow", "large", "left", 0, 0),))
    judged = judge(clip.frames, scene)
    assert judged.colour and judged.motion and judged.background


@pytest.mark.parametrize("target", [0.5, 0.8])
def test_the_target_ratio_is_met_within_three_points(mini, target):
    clips = mini.batch([PROMPT, "a small red circle circling over a striped teal background"], [1, 2], replay=target)
    for clip in clips:
        assert clip.stats.replay.replay_ratio == pytest.approx(target, abs=0.03)

import json

import pytest

from fastcar.analysis.evaluate import evaluate_world, held_out_prompts
from fastcar.cli import main
from fastcar.training import world


def test_rendered_truth_is_right():
    summary = evaluate_world(None, prompts=20, seed=3).summary()
    assert all(summary[name]["mean"] >= 0.95 for name in ("colour", "shape", "motion", "background"))


def test_frozen_truth_does_not_move():
    run = evaluate_world(None, prompts=20, seed=3, frozen=True)
    still = [scene.sprites[0].motion == "still" for scene in run.scenes]
    assert [j.motion for j in run.judgements] == still
    assert run.summary()["colour"]["mean"] == 1
    motions = run.details()["motion"]
    assert sum(of for _, of in motions.values()) == 20 and motions["still"][0] == motions["still"][1] == sum(still)
    assert all(right == 0 for name, (right, _) in motions.items() if name != "still")


def test_prompts_are_held_out():
    scenes, prompts = held_out_prompts(30)
    assert {world.split_of(scene) for scene in scenes} == {"test"}
    assert prompts[0] == world.caption(scenes[0], full=True)


def test_the_command_prints_means_and_intervals(capsys):
    assert main(["evaluate", "world", "--rendered", "--prompts", "5", "--details", "--json"]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    motion, (right, of) = next(iter(document["details"]["motion"].items()))
    assert f"{motion} {right}/{of}" in out
    for name in ("colour", "shape", "motion", "background"):
        assert {"mean", "low", "high"} <= set(document[name])
        assert 0 <= document[name]["low"] <= document[name]["mean"] <= document[name]["high"] <= 1


@pytest.mark.parametrize("options", [{"prompts": 0}, {"prompts": 1, "batch": 0}, {"prompts": 1, "split": "best"}])
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=r"at least 1|unknown split 'best'"):
        evaluate_world(None, **options)


def test_the_codecs_own_limit_is_told():
    import fastcar

    run = evaluate_world(fastcar.load("mini"), prompts=4, reconstructed=True)
    assert run.clips is None and run.summary()["background"]["mean"] == 1
    assert run.reconstruction_psnr is not None and run.reconstruction_psnr >= 34

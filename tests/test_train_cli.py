"""From a user's own folder of captioned videos to a checkpoint that makes clips, by commands alone."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fastcar
from fastcar.cli import main
from fastcar.training.precision import mixed_precision
from fastcar.training.settings import DecoderTraining, TokenizerTraining
from fastcar.video import write_video


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    lines = []
    for i in range(6):
        frames = np.full((4, 32, 32, 3), 40, np.uint8)
        for t, frame in enumerate(frames):
            frame[8:20, 4 * t : 4 * t + 12, i % 3] = 220
        write_video(frames, folder / f"{i}.mp4")
        lines.append(json.dumps({"file": f"{i}.mp4", "caption": f"a box of colour {'abc'[i % 3]}"}))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


def test_own_clips_become_a_model(folder, tmp_path, capsys):
    run = ["--run-dir", str(tmp_path / "run")]
    clips = ["--folder", str(folder), "--size", "32", "--frames", "4"]
    small = ["--steps", "2", "--batch", "4", "--pool", "3", "--unquantised", "1"]
    assert main(["train", "tokenizer", *run, *clips, *small]) == 0
    small = ["--steps", "1", "--clips", "1", "--first-frames", "1", "--no-compile"]
    assert main(["train", "decoder", *run, *clips, *small]) == 0
    assert main(["train", "decoder", *run, *clips, *small, "--name", "more", "--start-from", "decoder"]) == 0
    capsys.readouterr()
    assert main(["train", "export", *run, "--name", "more", "-o", str(tmp_path / "own"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 1
    own = str(tmp_path / "own")
    assert (
        main(["train", "decoder", *run, *clips, *small, "--name", "on", "--start-from", own, "--tokenizer", own]) == 0
    )
    both = ["-o", str(tmp_path / "mean"), "--average-with"]
    assert main(["train", "export", *run, "--name", "decoder", *both, own]) == 0
    assert main(["train", "export", *run, "--name", "decoder", "-o", str(tmp_path / "alone")]) == 0
    alone, more, mean = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "own", "mean"))
    for name, value in mean.items():
        assert torch.equal(value, ((alone[name].float() + more[name].float()) / 2).bfloat16()), name
    assert any(not torch.equal(alone[name], more[name]) for name in mean)
    assert main(["train", "export", *run, *both, "nobody"]) == 2
    assert "--average-with names" in capsys.readouterr().err
    clip = fastcar.load(own)("a box of colour b", frames=2)
    assert clip.frames.shape == (2, 32, 32, 3)


def test_runs_that_do_not_belong_together_are_refused(folder, tmp_path, capsys):
    run = ["--run-dir", str(tmp_path / "run")]
    clips = ["--folder", str(folder), "--frames", "4"]
    tokenizer = ["train", "tokenizer", *run, *clips, "--size", "32", "--steps", "2", "--batch", "4", "--pool", "3"]
    tokenizer += ["--unquantised", "1"]
    decoder = ["train", "decoder", *run, *clips, "--steps", "1", "--clips", "1", "--first-frames", "1", "--no-compile"]
    assert main(tokenizer) == 0 and main([*tokenizer, "--name", "other", "--seed", "5"]) == 0
    assert main(decoder) == 0  # the size is the tokenizer's
    capsys.readouterr()
    for words, shown in [
        ([*decoder, "--size", "64"], "--size 64"),
        ([*decoder, "--tokenizer", "other"], "another tokenizer's codes"),
        ([*decoder, "--tokenizer", "decoder"], "kind 'decoder'"),
        ([*decoder, "--name", "n", "--start-from", "tokenizer"], "kind 'tokenizer'"),
        ([*decoder, "--name", "n", "--encode", "3"], "--encode"),
        ([*tokenizer, "--name", "n", "--start-from", "decoder"], "kind 'decoder'"),
        (["train", "export", *run, "-o", str(tmp_path / "x"), "--tokenizer", "other"], "another tokenizer"),
        (["train", "export", *run, "-o", str(folder / "0.mp4")], "is a file"),
    ]:
        assert main(words) == 2, words
        assert shown in capsys.readouterr().err
    assert main(["train", "export", *run, "-o", str(tmp_path / "own"), "--max-age", "0"]) == 0
    assert fastcar.load(tmp_path / "own").model.recommended_replay(0.5).max_age is None


@pytest.mark.parametrize("caption", ["!!!", "word " * 40])
def test_captions_that_cannot_be_read_are_told_with_their_line(folder, tmp_path, capsys, caption):
    with (folder / "captions.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"file": "0.mp4", "caption": caption}))
    assert main(["train", "tokenizer", "--run-dir", str(tmp_path / "r"), "--folder", str(folder)]) == 2
    assert "captions.jsonl, line 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train", "tokenizer", "--steps", "0"], "steps"),
        (["train", "tokenizer", "--steps", "100"], "unquantised"),
        (["train", "tokenizer", "--batch", "-1"], "batch"),
        (["train", "tokenizer", "--pool", "0"], "pool"),
        (["train", "tokenizer", "--refresh", "0"], "refresh"),
        (["train", "tokenizer", "--learning-rate", "nan"], "learning_rate"),
        (["train", "tokenizer", "--save-every", "0"], "save_every"),
        (["train", "tokenizer", "--device", "nonsense"], "--device nonsense"),
        (["train", "decoder", "--warmup", "0"], "warmup"),
        (["train", "decoder", "--clips", "-1"], "clips"),
        (["train", "decoder", "--clips", "0", "--first-frames", "0"], "see nothing"),
        (["train", "decoder", "--replay-ratio", "2"], "replay_ratio"),
        (["train", "decoder", "--depth-weights", "0,0"], "depth_weights"),
        (["train", "decoder"], "train tokenizer"),
        (["train", "export", "-o", "x"], "train tokenizer"),
        (["train", "tokenizer", "--start-from", "other"], "other"),
        (["train", "tokenizer", "--size", "32"], "rendered world"),
        (["train", "tokenizer", "--folder", "nowhere"], "nowhere"),
    ],
)
def test_what_is_missing_is_said(words, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert shown in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["tokenizer", "decoder"])
def test_help_says_what_every_setting_means(part, capsys):
    with pytest.raises(SystemExit):
        main(["train", part, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    settings = {"tokenizer": TokenizerTraining, "decoder": DecoderTraining}[part]
    for field in fields(settings):
        option = f"--{field.name.replace('_', '-')} "
        assert re.search(rf"{option}(?:[A-Z_]+ )?[a-z].* ?(?:\(default|--|$)", text), option
    assert "``" not in text


def test_bfloat16_is_used_only_where_it_is_multiplied(monkeypatch):
    for name, used in ((None, False), ("avx512_f", False), ("avx512_bf16", True), ("amx_bf16", True)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: {name: True}, raising=False)
        with mixed_precision("cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.bfloat16 if used else torch.float32)

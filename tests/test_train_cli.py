"""From a user's own folder of captioned videos to a checkpoint that makes clips, by commands alone."""

import json

import numpy as np
import pytest

import fastcar
from fastcar.cli import main
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
    clip = fastcar.load(own)("a box of colour b", frames=2)
    assert clip.frames.shape == (2, 32, 32, 3)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
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

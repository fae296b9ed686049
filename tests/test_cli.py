"""The command line, run in this process on a tiny random model; real files in a temporary folder."""

import json
import subprocess
import sys

import pytest

from fastcar.cli import main
from fastcar.replay import ReplayTrace
from fastcar.video import read_video

PROMPT = "a red circle moving right"


@pytest.fixture
def run(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words, model=True):
        code = main([*words, *(["--model", str(tiny_folder)] if model else [])])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_generate_writes_a_clip_and_says_so(run, tmp_path):
    code, out, _ = run("generate", PROMPT, "-o", "clip.mp4", "--replay", "0.5", "--trace", "t.npz", "--json")
    assert code == 0
    document = json.loads(out.splitlines()[-1])
    wanted = "prompt output frames height width seed dtype engine seconds seconds_prefill seconds_decode ms_per_token"
    wanted += " replay_ratio replay_share_of_all both_rows_rate mlp_rows_total mlp_rows_replayed"
    assert set(wanted.split()) <= set(document)
    assert document["output"] == "clip.mp4" and document["mlp_rows_replayed"] > 0
    assert len(read_video(tmp_path / "clip.mp4")) == 4
    stats = ReplayTrace.load(tmp_path / "t.npz").statistics()
    assert stats.replay_ratio == document["replay_ratio"]
    assert stats.mlp_rows_replayed == document["mlp_rows_replayed"]


@pytest.mark.parametrize("name", ["clip.gif", "sheet.png"])
def test_other_formats(run, tmp_path, name):
    assert run("generate", PROMPT, "-o", name)[0] == 0
    assert (tmp_path / name).stat().st_size > 100


def test_default_name_tells_prompt_and_settings(run, tmp_path):
    run("generate", PROMPT, "--replay", "0.5", "--seed", "7")
    assert [p.name for p in tmp_path.iterdir()] == ["a-red-circle-moving-right_seed7_replay0.5_tiny0.mp4"]


def test_several_clips_have_seeds_of_their_own(run, tmp_path):
    _, out, _ = run("generate", PROMPT, "-n", "2", "--seed", "4", "-o", "c.gif", "--json")
    clips = json.loads(out.splitlines()[-1])["clips"]
    assert [c["seed"] for c in clips] == [4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c-0.gif", "c-1.gif"]


@pytest.mark.parametrize("threshold", ["-inf", "-0.5,none,-.1", "-8"])
def test_thresholds_may_be_negative(run, threshold):
    code, out, _ = run("generate", PROMPT, "-o", "c.mp4", "--score", "tas", "--threshold", threshold, "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["mlp_rows_replayed"] > 0


def test_clips_of_other_settings_have_other_names(run, tmp_path):
    settings = ["--guidance 1", "--temperature 0", "--top-k 1", "--top-p 0.5", "--dtype bfloat16", "--frames 2"]
    settings += ["--replay 0.5", "--replay 0.5 --max-age 2", "--replay 0.5 --no-tie-guidance", ""]
    for words in settings:
        assert run("generate", PROMPT, *words.split())[0] == 0
    assert len(list(tmp_path.glob("*.mp4"))) == len(settings)


def test_thresholds_by_layer(run):
    _, out, _ = run("generate", PROMPT, "-o", "c.gif", "--threshold=-inf,none,inf", "--score", "tas-official", "--json")
    assert json.loads(out.splitlines()[-1])["replay_ratio"] == pytest.approx(1 / 3)


def test_unknown_words_warn_and_go_on(run):
    code, _, err = run("generate", "a rad circle moving right", "-o", "c.gif")
    assert code == 0 and "'rad'" in err and "red" in err and "knows the words" not in err


def test_a_word_like_no_known_one_shows_all_words(run):
    code, _, err = run("generate", "zzyzx", "-o", "c.gif")
    assert code == 0 and "'zzyzx'" in err and "knows the words a " in err


def test_compare(run, tmp_path):
    code, out, _ = run("compare", PROMPT, "--replay", "0.8", "-o", "both", "--json")
    document = json.loads(out.splitlines()[-1])
    assert code == 0
    assert sorted(p.name for p in (tmp_path / "both").iterdir()) == ["compare.png", "dense.mp4", "replay.mp4"]
    assert document["dense"]["replay_ratio"] == 0 < document["replay"]["replay_ratio"]
    assert len(document["speedups"]) == 3 and document["speedup"] == sorted(document["speedups"])[1]
    assert document["speedups"][0] == pytest.approx(
        document["dense"]["seconds_decode"] / document["replay"]["seconds_decode"]
    )
    assert document["ssim"] <= 1 and (document["psnr"] is None or document["psnr"] > 0)


def test_comparing_with_a_dense_clip_finds_no_difference(run):
    words = ["--threshold", "inf", "--no-ceiling", "--rounds", "1"]
    _, out, _ = run("compare", PROMPT, *words, "-o", "both", "--json")
    document = json.loads(out.splitlines()[-1])
    assert len(document["speedups"]) == 1
    assert document["psnr"] is None and document["ssim"] == 1 and document["speedup_ceiling"] is None


def test_info(run):
    code, out, _ = run("info", "--json", model=False)
    document = json.loads(out.splitlines()[-1])
    assert code == 0 and "reference" in document["engines"] and "mini" in document["models"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["generate", ""], "no words"),
        (["generate", PROMPT, "-o", "clip.avi"], ".avi"),
        (["generate", PROMPT, "-o", "nowhere/clip.mp4"], "nowhere"),
        (["generate", PROMPT, "-o", "c.mp4", "--frames", "0"], "frames"),
        (["generate", PROMPT, "-o", "c.mp4", "--threshold", "nan"], "nan"),
        (["generate", PROMPT, "-o", "c.mp4", "--threshold", "1,x,2"], "1,x,2"),
        (["generate", PROMPT, "-o", "c.mp4", "--threshold", "1,2"], "2 values"),
        (["generate", PROMPT, "-o", "c.mp4", "--replay", "1.2"], "1.2"),
        (["generate", PROMPT, "-o", "c.mp4", "--replay", "0.5", "--threshold", "1"], "not both"),
        (["generate", PROMPT, "-o", "c.mp4", "--score", "tas"], "--score: only with"),
        (["generate", PROMPT, "-o", "c.mp4", "--replay", "0.5", "--score", "best"], "'best'"),
        (["generate", PROMPT, "-o", "c.mp4", "--count", "0"], "--count"),
        (["generate", PROMPT, "-o", "c.mp4", "--dtype", "int3"], "int3"),
        (["generate", PROMPT, "-o", "c.mp4", "--engine", "warp"], "warp"),
        (["generate", PROMPT, "-o", "c.mp4", "--threads", "0"], "--threads"),
        (["generate", PROMPT, "-o", "c.mp4", "--trace", "t.txt"], ".txt"),
        (["generate", PROMPT, "-o", "c.mp4", "--seed", "-1"], "-1"),
        (["evaluate", "world", "--prompts", "0"], "prompts"),
        (["compare", PROMPT, "-o", "both", "--frames", "0"], "frames"),
        (["compare", PROMPT, "-o", "both", "--replay", "2"], "2.0"),
        (["compare", PROMPT, "-o", "both", "--rounds", "0"], "rounds"),
        (["generate", PROMPT, "-o", "c.mp4", "--threshold", "none"], "leave it out"),
        (["generate", PROMPT, "-o", "c.mp4", "--frames", "100000000000"], "GiB"),
        (["generate", PROMPT, "-o", "c.mp4", "--temperature", "1e-38"], "temperature"),
        (["generate", PROMPT, "-o", "c.mp4", "--threads", "9999999999999"], "--threads"),
        (["evaluate", "world", "--seed", "-1"], "seed must lie in"),
        (["evaluate", "world", "--rendered", "--replay", "0.5"], "--replay"),
        (["evaluate", "world", "--reconstructed", "--frames", "3"], "--frames"),
    ],
)
def test_a_wrong_input_ends_in_one_clear_line(run, tmp_path, words, shown):
    code, out, err = run(*words)
    assert code == 2 and out == ""
    lines = [line for line in err.replace("\r", "\n").splitlines() if "error" in line]
    assert len(lines) == 1 and shown in lines[0] and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["generate"], ["dance"], ["generate", PROMPT, "--frames", "two"]])
def test_usage_errors_are_one_line_too(run, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_version_and_help_import_no_torch():
    code = (
        "import sys; from fastcar.cli import main\ntry: main(['--version'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr
    done = subprocess.run([sys.executable, "-m", "fastcar", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("fastcar 0.")


def test_a_folder_in_the_place_of_a_clip_is_told_before_comparing(run, tmp_path):
    (tmp_path / "both" / "dense.mp4").mkdir(parents=True)
    code, _, err = run("compare", PROMPT, "-o", "both")
    assert code == 2 and "dense.mp4 is a folder" in err and "generating" not in err


def test_a_missing_model_is_named(run):
    code, _, err = run("generate", PROMPT, "--model", "nope", model=False)
    assert code == 2 and "nope" in err


def test_interrupting_leaves_nothing(run, tmp_path, monkeypatch):
    from fastcar.pipeline import Pipeline

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "batch", interrupted)
    code, _, err = run("generate", PROMPT, "-o", "clip.mp4")
    assert code == 130 and "interrupted" in err and list(tmp_path.iterdir()) == []


def test_a_frozen_or_odd_number_is_still_json(run):
    """Whatever is printed last must be JSON as the standard has it: no NaN, no Infinity."""
    _, out, _ = run("compare", PROMPT, "--threshold", "inf", "-o", "x", "--no-ceiling", "--json")

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(out.splitlines()[-1], parse_constant=refuse)

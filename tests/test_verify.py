"""Recorded traces of the official code, replayed: all of them pass, and anything wrong makes them fail."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastcar
from fastcar.analysis.verify import verify
from fastcar.cli import main

from .vila_u_checkpoint import GOLDEN

CHECKPOINT, TRACES = GOLDEN / "tiny-vila-u", GOLDEN / "traces"


@pytest.fixture(scope="module")
def pipe():
    return fastcar.load(CHECKPOINT)


def test_every_trace_passes(pipe):
    reports = {report.file: report for report in verify(pipe, TRACES)}
    assert {name for name, report in reports.items() if report.passed} == set(reports)
    teacher = {f"teacher_{kind}" for kind in ("all", "dense", "median", "mixed", "perlayer")}
    assert set(reports) == {*teacher, "e2e_dense", "prompts", "rqvae_decode", "sampling"}
    compared = set(reports["teacher_dense"].differences)
    assert {"skip", "tas", "tas_heads", "k_cache", "q_pre_rope", "decode_mlp_out", "rq_logits_cfg"} <= compared
    assert {"codes", "skip", "probs", "frames_uint8", "noise from the seed"} <= set(reports["e2e_dense"].differences)
    assert reports["e2e_dense"].not_compared == ["text_tokens"]


def traces_with(folder, file, change):
    """A folder of one trace, with one tensor changed."""
    folder.mkdir()
    shutil.copy(TRACES / f"{file}.json", folder)
    tensors = load_file(TRACES / f"{file}.safetensors")
    change(tensors)
    save_file(tensors, folder / f"{file}.safetensors")
    return folder


def nudge(name, by):
    def change(tensors):
        tensors[name].view(-1)[-1] += by

    return change


@pytest.mark.parametrize(
    ("file", "name", "by"),
    [
        ("teacher_perlayer", "decode_mlp_out", 2e-4),
        ("teacher_perlayer", "tas", 2e-4),
        ("teacher_dense", "k_cache", -2e-4),
        ("teacher_mixed", "rq_logits_raw", 2e-3),
        ("rqvae_decode", "frames_raw", 2e-4),
        ("rqvae_decode", "frames_uint8", 3),
        ("sampling", "probs_3", 2e-4),
        ("sampling", "samples_0", 1),
        ("e2e_dense", "codes", -1),
        ("e2e_dense", "decode_final_hidden", 2e-4),
    ],
)
def test_one_wrong_value_is_found(pipe, tmp_path, file, name, by):
    (report,) = verify(pipe, traces_with(tmp_path / "t", file, nudge(name, by)))
    assert not report.passed and report.differences[name] > report.tolerances[name]


def test_a_wrong_decision_is_found(pipe, tmp_path):
    def change(tensors):
        tensors["skip"][20, 1, 2] ^= 1

    (report,) = verify(pipe, traces_with(tmp_path / "t", "teacher_perlayer", change))
    assert [name for name in report.differences if report.differences[name] > report.tolerances[name]] == ["skip"]


def test_undefined_is_not_a_number(pipe, tmp_path):
    def change(tensors):
        tensors["tas"][0] = 0.0

    (report,) = verify(pipe, traces_with(tmp_path / "t", "teacher_mixed", change))
    assert report.differences["tas"] == float("inf") and json.dumps(report.to_dict(), allow_nan=False)


def test_the_command(tmp_path, capsys):
    good = traces_with(tmp_path / "good", "rqvae_decode", lambda tensors: None)
    assert main(["verify", str(CHECKPOINT), str(good), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PASS  rqvae_decode") and json.loads(out.splitlines()[-1])["pass"] is True
    bad = traces_with(tmp_path / "bad", "rqvae_decode", nudge("frames_raw", 1.0))
    assert main(["verify", str(CHECKPOINT), str(bad), "--json"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  rqvae_decode" in out and json.loads(out.splitlines()[-1])["pass"] is False


def test_wrong_input_is_told(tmp_path, tiny_folder, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    torn = traces_with(tmp_path / "torn", "rqvae_decode", lambda tensors: None)
    data = (torn / "rqvae_decode.safetensors").read_bytes()
    (torn / "rqvae_decode.safetensors").write_bytes(data[:-9])
    other = traces_with(tmp_path / "other", "rqvae_decode", lambda tensors: tensors.pop("codes"))
    for checkpoint, traces, shown in (
        (CHECKPOINT, empty, "holds no traces"),
        (CHECKPOINT, tmp_path / "none", "no folder of traces"),
        (CHECKPOINT, torn, "rqvae_decode.safetensors is damaged"),
        (CHECKPOINT, other, "not a trace of this layout"),
        (tiny_folder, TRACES, "VILA-U model in float32, got fastcar-mini"),
        (tmp_path / "none", TRACES, "no model"),
    ):
        assert main(["verify", str(checkpoint), str(traces)]) == 2
        error = capsys.readouterr().err
        assert shown in error and len(error.splitlines()) == 1, error


def test_it_leaves_no_hooks(pipe):
    verify(pipe, TRACES)
    for module in (pipe.model.decoder, pipe.model.codec):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert torch.is_grad_enabled()

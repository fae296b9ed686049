"""Recorded traces of the official code, replayed: all of them pass, and anything wrong makes them fail."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fastcar
from fastcar import ReplayConfig
from fastcar.analysis.verify import verify
from fastcar.cli import main
from fastcar.sampling import SamplingConfig
from fastcar.sampling import probabilities as sampling_probabilities

from .vila_u_checkpoint import GOLDEN

CHECKPOINT, TRACES = GOLDEN / "tiny-vila-u", GOLDEN / "traces"


@pytest.fixture(scope="module")
def pipe():
    return fastcar.load(CHECKPOINT, engine="reference")


def test_every_trace_passes(pipe):
    reports = {report.file: report for report in verify(pipe, TRACES)}
    assert {name for name, report in reports.items() if report.passed} == set(reports)
    teacher = {f"teacher_{kind}" for kind in ("all", "dense", "median", "mixed", "perlayer")}
    assert set(reports) == {*teacher, "e2e_dense", "prompts", "rqvae_decode", "sampling"}
    compared = set(reports["teacher_dense"].differences)
    assert {"skip", "tas", "tas_heads", "k_cache", "q_pre_rope", "decode_mlp_out", "rq_logits_cfg"} <= compared
    assert {"codes", "skip", "probs", "frames_uint8", "noise"} <= set(reports["e2e_dense"].differences)
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
    wrong = [name for name in report.differences if report.differences[name] > report.tolerances[name]]
    assert {name.split(",")[0] for name in wrong} == {"skip"}


def recorded_here(pipe, folder, **about):
    """An end-to-end trace of two frames, drawn from seed 3 without text draws: it shows what of a trace is heeded."""
    about = {**json.loads((TRACES / "e2e_dense.json").read_text()), "frames": 2, "seed": 3, **about}
    generator = torch.Generator().manual_seed(3)
    noise = torch.stack([torch.empty(2, 32).exponential_(1, generator=generator) for _ in range(32 * 4)])
    noise = noise.unflatten(0, (32, 4))
    hidden, seen = [], []
    hook = pipe.model.decoder.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    probabilities = pipe.model.depth_head.classifier_mlp.linear.register_forward_hook(
        lambda module, inputs, output: seen.append(output[:, 0])
    )
    config = ReplayConfig(threshold=about["thresholds"], score="tas-official", strict=True)
    clips = pipe.batch(
        about["prompts"], [0, 0], noise=noise, replay=config, frames=2, guidance=about["cfg"], top_k=about["top_k"]
    )
    hook.remove()
    probabilities.remove()
    logits = torch.stack(seen).unflatten(0, (32, 4))
    rows = logits.shape[2]
    if rows == 4:
        logits = logits[:, :, 2:] + about["cfg"] * (logits[:, :, :2] - logits[:, :, 2:])
    ids, mask = pipe.model.token_ids(about["prompts"], True, 2)
    skip = torch.from_numpy(np.concatenate([clip.trace.replayed for clip in clips], 2))
    order = [0, 2, 1, 3] if rows == 4 else [0, 1]
    raw = pipe.model.codec.raw_frames(torch.stack([torch.from_numpy(clip.codes) for clip in clips]).flatten(0, 1))
    frames = ((raw + 1) * 127.5).clamp(0, 255).unflatten(0, (2, 2))
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "codes": torch.stack([torch.from_numpy(clip.codes).flatten(0, 1) for clip in clips]),
        "noise": noise,
        "probs": torch.from_numpy(
            sampling_probabilities(logits.numpy(), SamplingConfig(1.0, about["top_k"] or 0, 0.96))
        ),
        "skip": skip[..., order],
        "decode_final_hidden": torch.stack(hidden[1:]),
        "frames_clamped": frames,
        "frames_uint8": frames.to(torch.uint8),
    }
    folder.mkdir()
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, folder / "e2e_own.safetensors")
    (folder / "e2e_own.json").write_text(json.dumps(about))
    return folder


REPLAYED = {"thresholds": [0.1, None, -0.2, 0.0], "text_draw": "none"}


@pytest.mark.parametrize(
    "about", [REPLAYED, {**REPLAYED, "text_draw": "official", "text_seed": 9}, {**REPLAYED, "cfg": 1.0, "top_k": None}]
)
def test_other_settings_of_clips_are_heeded(pipe, tmp_path, about):
    folder = recorded_here(pipe, tmp_path / "t", **about)
    (report,) = verify(pipe, folder)
    assert report.passed, str(report)
    skip = load_file(folder / "e2e_own.safetensors")["skip"]
    assert skip.any() and skip.shape[2] == (2 if about.get("cfg") == 1.0 else 4)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"text_draw": "official"}, "noise"),
        ({"seed": 4}, "noise"),
        ({"thresholds": [None, None, None, None]}, "skip"),
        ({"cfg": 2.0}, "probs"),
        ({"top_p": 0.5}, "probs"),
        ({"temperature": 1.5}, "probs"),
    ],
)
def test_other_settings_than_recorded_are_found(pipe, tmp_path, wrong, name):
    folder = recorded_here(pipe, tmp_path / "t", **REPLAYED)
    path = folder / "e2e_own.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    (report,) = verify(pipe, folder)
    assert not report.passed and report.differences[name] > report.tolerances[name]


def test_a_wrong_setting_names_its_file(pipe, tmp_path):
    for wrong in ({"thresholds": []}, {"cfg": "x"}, {"frames": 0}, {"prompts": []}):
        folder = tmp_path / next(iter(wrong))
        folder.mkdir()
        about = json.loads((TRACES / "e2e_dense.json").read_text())
        (folder / "e2e_dense.json").write_text(json.dumps({**about, **wrong}))
        shutil.copy(TRACES / "e2e_dense.safetensors", folder)
        with pytest.raises(ValueError, match=r"e2e_dense\.json: not a trace of this layout and model"):
            verify(pipe, folder)


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

"""Reading weights: every layout gives the same tensors, every damage one clear error."""

import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastcar.models.checkpoint import Weights, load_module, read_json

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2), "b": torch.zeros(1, dtype=torch.int64)}


def write(folder, layout):
    folder.mkdir()
    first, second = {"a.weight": TENSORS["a.weight"]}, {k: v for k, v in TENSORS.items() if k != "a.weight"}
    if layout == "safetensors":
        save_file(TENSORS, folder / "model.safetensors")
    elif layout == "sharded safetensors":
        save_file(first, folder / "model-1.safetensors")
        save_file(second, folder / "model-2.safetensors")
    elif layout == "bin":
        torch.save(TENSORS, folder / "pytorch_model.bin")
    elif layout == "old bin":
        torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        torch.save(first, folder / "model-1.bin")
        torch.save(second, folder / "model-2.bin")
    if layout.startswith("sharded"):
        stem, end = ("model.safetensors", "safetensors") if "safe" in layout else ("pytorch_model.bin", "bin")
        shards = {name: f"model-{1 if name in first else 2}.{end}" for name in TENSORS}
        (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


LAYOUTS = ["safetensors", "sharded safetensors", "bin", "old bin", "sharded bin"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors(tmp_path, layout):
    weights = Weights(write(tmp_path / "w", layout))
    assert set(weights.files) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert name in weights and torch.equal(weights[name], tensor)
    with torch.device("meta"):
        module = nn.Linear(3, 2)
    load_module(module, weights, lambda name: f"a.{name}", torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16 and torch.equal(module.weight.float(), TENSORS["a.weight"])


class Evil:
    def __reduce__(self):
        return print, ("code was run",)


def test_a_pickle_that_wants_code_is_refused(tmp_path, capsys):
    for name, write_evil in (
        ("zip", torch.save),
        ("raw", lambda found, path: path.write_bytes(pickle.dumps(found, 2))),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write_evil({"a": Evil()}, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged, or holds more than tensors"):
            Weights(folder)
    assert "code was run" not in capsys.readouterr().out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncated_files_are_named(tmp_path, layout):
    folder = write(tmp_path / "w", layout)
    for file in folder.glob("*model*"):
        if file.suffix != ".json":
            file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"model.*(safetensors|bin) is damaged"):
        _ = Weights(folder)["a.weight"]


@pytest.mark.parametrize("layout", ["bin", "old bin"])
def test_no_damage_escapes_as_another_error(tmp_path, layout):
    """Pickles fail in many ways: unknown storages, torn numbers, empty stacks."""
    whole = (write(tmp_path / "w", layout) / "pytorch_model.bin").read_bytes()
    refused = 0
    for place in range(0, len(whole), max(1, len(whole) // 100)):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
            (tmp_path / "w" / "pytorch_model.bin").write_bytes(damaged)
            try:
                weights = Weights(tmp_path / "w")
                for name in weights.files:
                    weights[name].sum()
            except ValueError:
                refused += 1
    assert refused > 100


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no weights"):
        Weights(tmp_path)
    folder = write(tmp_path / "w", "sharded safetensors")
    weights = Weights(folder)
    with pytest.raises(ValueError, match="holds no tensor 'c'"):
        _ = weights["c"]
    with torch.device("meta"):
        module = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"model-1.safetensors: 'a.weight' must be \[3, 2\], got \[2, 3\]"):
        load_module(module, weights, lambda name: f"a.{name}")
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-2.safetensors is missing"):
        _ = Weights(folder)["b"]


def test_an_index_must_stay_in_its_folder(tmp_path):
    for index, shown in (
        ("[]", "JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": "../x.bin"}}', "'../x.bin'"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=shown):
            Weights(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_no_more_than_the_model_and_one_shard(tmp_path):
    shards, size = {}, 2048 * 1024 * 4
    for i in range(8):
        save_file({f"{i}.weight": torch.zeros(2048, 1024)}, tmp_path / f"model-{i}.safetensors")
        shards[f"{i}.weight"] = f"model-{i}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    code = f"""
import resource, torch
from pathlib import Path
from torch import nn
from fastcar.models.checkpoint import Weights, load_module
with torch.device("meta"):
    module = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(8)))
rss = lambda: int([l for l in open("/proc/self/status") if l.startswith("VmHWM")][0].split()[1]) * 1024
before = rss()
load_module(module, Weights(Path({str(tmp_path)!r})))
print(rss() - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 8 * size <= grown < 9.5 * size

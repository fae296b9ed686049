"""The benchmark's sums, and that it runs; what it measures is not for tests."""

import json

import pytest

from fastcar.bench import decode
from fastcar.bench.shapes import SHAPES, Shape
from fastcar.cli import main
from fastcar.decoder import native
from fastcar.decoder.config import DecoderConfig

TINY = Shape("tiny", DecoderConfig(32, 2, 4, 2, 8, 48), context=40)


def test_bytes_by_hand():
    c = TINY.config
    assert c.attention_weights == 32 * 8 * (4 + 4 + 2 + 2) and c.mlp_weights == 3 * 32 * 48
    assert TINY.weight_bytes("bfloat16") == 2 * 2 * (3072 + 4608)
    assert TINY.weight_bytes("bfloat16", skipped=0.5) == 2 * 2 * (3072 + 2304)
    assert TINY.weight_bytes("int8") == 2 * (3072 + 4608) * (64 + 2) / 64
    assert TINY.cache_bytes("bfloat16") == 2 * 2 * 2 * 2 * 8 * 40 * 2
    assert TINY.cache_bytes("float32", attended=10) == 2 * 2 * 2 * 2 * 8 * 10 * 4
    assert TINY.step_bytes("float32", 1.0) == 4 * 2 * 3072 + TINY.cache_bytes("float32")


def test_the_shapes_are_those_that_are_documented():
    assert {name: shape.config.mlp_weights * shape.config.layers for name, shape in SHAPES.items()} == {
        "W7": 4 * 3 * 4096 * 11008,
        "W05": 16 * 3 * 1024 * 2816,
        "WS": 8 * 3 * 256 * 688,
    }


@pytest.mark.skipif(native.unavailable() is not None, reason="no native decoder")
def test_every_engine_is_timed():
    pytest.importorskip("transformers")
    names = ["reference", "transformers", "native-float32", "native-bfloat16", "native-int8"]
    result = decode.run_decode(TINY, names, steps=4, log=lambda text: None, quick=True)
    assert list(result["rows"]) == names and not result["left_out"]
    assert all(row["ms"] > 0 and row["fraction"] > 0 for row in result["rows"].values())
    rows = {row["setting"]: row for row in decode.run_replay(TINY, steps=20, log=lambda text: None)}
    assert rows["1.00 tied"]["both_rows_rate"] == 1 and rows["0.00 tied"]["replay_ratio"] == 0
    assert rows["0.80 apart"]["both_rows_rate"] < rows["0.80 tied"]["both_rows_rate"]
    assert rows["1.00 tied"]["ideal"] == TINY.step_bytes("bfloat16") / TINY.step_bytes("bfloat16", 1.0)


def test_the_command(monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "W05", TINY)
    main(["bench", "--shape", "W05", "--peers", "reference", "--steps", "3", "--quick", "--json"])
    printed = capsys.readouterr().out.splitlines()
    document = json.loads(printed[-1])
    assert list(document["decode"][0]["rows"]) == ["reference"] and document["decode"][0]["layers"] == 1
    assert any(line.startswith("| reference | bfloat16 |") for line in printed)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--shape", "W9"], "unknown shapes W9; known are W7, W05, WS"),
        (["--peers", "vllm", "--shape", "WS", "--quick"], "unknown peers vllm; known are reference"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--layers", "-1"], "layers must be at least 1, got -1"),
    ],
)
def test_wrong_options_are_named(words, shown, capsys):
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(main(["bench", *words]))
    assert stopped.value.code == 2
    assert shown in capsys.readouterr().err

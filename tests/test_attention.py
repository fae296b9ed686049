"""Attention sinks and windows: rings against masks, masks against a slow, obvious attention."""

import math

import pytest
import torch

import fastcar
from fastcar.cli import main
from fastcar.decoder.kv_cache import AttentionConfig
from fastcar.decoder.llama import apply_rope, rope_tables
from fastcar.decoder.reference import ReferenceDecoder
from fastcar.geometry import Geometry
from fastcar.replay import ReplayConfig

from .test_reference import CONFIG, random_inputs, random_model, run

GEOMETRY = Geometry(frames=6, tokens_per_frame=5, prefix=6)
PADS = {"unpadded": (0, 0, 0), "padded": (0, 2, 5)}
WINDOWS = [(4, 0), (4, 2), (3, 6), (11, 3), (5, "prompt"), (1, 1), (2, 9), ("2 frames", 4), ("1 frame", 0)]


def inputs(padding, geometry=GEOMETRY):
    x = random_inputs(rows=3, geometry=geometry)
    mask = torch.stack([torch.arange(geometry.prefix) >= pad for pad in PADS[padding]])
    return x, mask


@torch.no_grad()
def obvious(model, x, mask, attention, geometry=GEOMETRY):
    """Every step from whole histories: sets of positions, keys rotated where they are attended to."""
    p, count = geometry.prefix, geometry.positions
    sinks, window = attention.sizes(geometry)
    rows = []
    for row, real in zip(x, mask, strict=True):
        pad = int(p - real.sum())
        first = 0 if attention.sinks == "prompt" else pad
        raw = [[] for _ in model.layers]
        prompt = real.nonzero()[:, 0]
        hidden = []
        h = row[prompt][None]
        cos, sin = rope_tables(torch.arange(len(prompt)), CONFIG.head_dim, CONFIG.rope_theta)
        for n, layer in enumerate(model.layers):
            _, k, v = layer.self_attn.qkv(layer.input_layernorm(h))
            raw[n] += [(int(prompt[i]), k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(len(prompt))]
            h = layer(h, cos, sin)[0]
        hidden.append(model.norm(h[:, -1]))
        for position in range(p, count):
            h = row[None, None, position]
            for n, layer in enumerate(model.layers):
                q, k, v = layer.self_attn.qkv(layer.input_layernorm(h))
                raw[n].append((position, k, v))
                seen = [e for e in raw[n] if e[0] < first + sinks or e[0] > position - window]
                places = torch.tensor([e[0] - pad for e in seen])
                if attention.positions == "window":
                    places = torch.arange(len(seen))
                cos, sin = rope_tables(places, CONFIG.head_dim, CONFIG.rope_theta)
                keys = apply_rope(torch.cat([e[1] for e in seen], 2), cos, sin)
                values = torch.cat([e[2] for e in seen], 2)
                h = h + layer.self_attn.attend(apply_rope(q, cos[-1:], sin[-1:]), keys, values, None)
                h = h + layer.mlp(layer.post_attention_layernorm(h))
            hidden.append(model.norm(h[:, 0]))
        rows.append(torch.cat(hidden))
    return torch.stack(rows)


@pytest.mark.parametrize("padding", PADS)
@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
@pytest.mark.parametrize("how", ["ring", "mask", "window positions"])
def test_against_a_slow_obvious_attention(engine, how, window, sinks, padding):
    model, (x, mask) = random_model(), inputs(padding)
    more = {"mask": {"evict": False}, "window positions": {"positions": "window"}}.get(how, {})
    attention = AttentionConfig(window, sinks, **more)
    got = run(engine(model), x, GEOMETRY, mask=mask, attention=attention)
    torch.testing.assert_close(got, obvious(model, x, mask, attention), atol=1e-5, rtol=0)


@pytest.mark.parametrize("padding", PADS)
@pytest.mark.parametrize("more", [{}, {"evict": False}, {"positions": "window"}])
def test_a_window_over_everything_is_full_attention_bit_for_bit(engine, more, padding):
    model, (x, mask) = random_model(), inputs(padding)
    full = run(engine(model), x, GEOMETRY, mask=mask)
    for window in (GEOMETRY.positions, GEOMETRY.positions - 4, 10**9, "6 frames"):
        wide = AttentionConfig(window, 6 if window == "6 frames" else 4, **more)
        assert torch.equal(run(engine(model), x, GEOMETRY, mask=mask, attention=wide), full)


def test_memory_is_that_of_sinks_and_window_however_long_the_clip():
    decoder, sizes = ReferenceDecoder(random_model()), set()
    for frames in (8, 64):
        geometry = Geometry(frames, 5, prefix=6)
        x = random_inputs(rows=2, geometry=geometry)
        run(decoder, x, geometry, attention=AttentionConfig(7, 3))
        sizes.add(decoder.memory()["kv_cache"])
        decoder.prefill(x[:, :6], geometry)
        assert decoder.memory()["kv_cache"] == 2 * 3 * 2 * 2 * geometry.positions * 8 * 4
    assert sizes == {2 * 3 * 2 * 2 * (7 + 3) * 8 * 4}


@pytest.mark.parametrize("score", ["tas", "tas-official", "input"])
@pytest.mark.parametrize("more", [{}, {"positions": "window"}])
def test_scores_do_not_depend_on_what_is_forgotten(engine, score, more):
    """The aligned key of N back is remembered apart. In the first layer states do not depend on attention."""
    model, (x, mask) = random_model(), inputs("padded")
    score_only = ReplayConfig(threshold=math.inf, score=score)
    scores = []
    for attention in (None, AttentionConfig(2, 1, **more)):  # a window of 2 under frames of 5
        decoder = engine(model)
        run(decoder, x, GEOMETRY, mask=mask, replay=score_only, attention=attention)
        scores.append(decoder.trace().scores)
    if score == "input":
        assert not (scores[0] == scores[1])[5:].all()  # the MLP's input has seen the attention
    else:
        assert (scores[0][:, 0] == scores[1][:, 0])[5:].all()


def test_replay_goes_with_a_window(engine):
    model, (x, mask) = random_model(), inputs("padded")
    both = {"replay": ReplayConfig(threshold=-math.inf), "attention": AttentionConfig(3, 1)}
    decoder = engine(model)
    run(decoder, x, GEOMETRY, mask=mask, **both)
    assert decoder.trace().statistics().replay_ratio == 1


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"window": 0}, "window must be .* got 0"),
        ({"window": "two frames"}, "'two frames'"),
        ({"window": "0 frames"}, "'0 frames'"),
        ({"window": True}, "True"),
        ({"window": 2.5}, "2.5"),
        ({"window": 4, "sinks": -1}, "sinks must be .* got -1"),
        ({"window": 4, "sinks": "all"}, "'all'"),
        ({"window": 4, "evict": 1}, "evict"),
        ({"window": 4, "positions": "relative"}, "'relative'"),
        ({"window": 4, "positions": "window", "evict": False}, "evict=True"),
    ],
)
def test_wrong_settings_are_named(settings, shown):
    with pytest.raises(ValueError, match=shown):
        AttentionConfig(**settings)


def test_a_pipeline_takes_a_window_at_loading_or_for_one_clip(tiny, tiny_folder):
    narrow = AttentionConfig(4, 2)
    one = tiny("a red circle", attention=narrow)
    other = fastcar.load(tiny_folder, attention=narrow)
    assert (one.codes == other("a red circle").codes).all()
    assert (other("a red circle", attention=AttentionConfig()).codes == tiny("a red circle").codes).all()
    assert one.stats.attention == narrow and one.stats.kv_cache_bytes < tiny("a red circle").stats.kv_cache_bytes
    assert "window" in str(one.stats)


def test_windows_on_the_command_line(tiny_folder, tmp_path, capsys, monkeypatch):
    import json

    monkeypatch.chdir(tmp_path)
    model = ["--model", str(tiny_folder), "--json"]
    words = ["--window", "1 frame", "--sinks", "prompt", "--window-positions", "window"]
    assert main(["generate", "a red circle", "-o", "c.gif", *words, *model]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = {"window": "1 frame", "sinks": "prompt", "evict": True, "positions": "window"}
    assert document["attention"] == expected
    assert main(["generate", "a red circle", *words, *model]) == 0
    assert len(list(tmp_path.glob("*window1-frame*.mp4"))) == 1
    assert main(["compare", "a red circle", "--window", "5", "--no-evict", "--rounds", "1", *model]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["dense"]["attention"]["window"] is None
    assert document["replay"]["attention"] == {"window": 5, "sinks": 4, "evict": False, "positions": "absolute"}
    for wrong, shown in ((["--window", "-3"], "'-3'"), (["--sinks", "2"], "--window"), (["--window", "x"], "'x'")):
        assert main(["generate", "a red circle", "-o", "d.gif", *wrong, *model]) == 2
        assert shown in capsys.readouterr().err

"""The VILA-U family: the golden checkpoint, and random ones of every other size."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import fastcar
from fastcar import ReplayConfig
from fastcar.cli import main
from fastcar.models.vila_u.config import read_config
from fastcar.models.vila_u.prompt import LlamaTokenizer, template

from .vila_u_checkpoint import GOLDEN, LLM, VISION, add_encoder, write_checkpoint

PROMPTS = ["a small boat drifts along the river, in the rain", "The clock shines"]
OFFICIAL = ReplayConfig(threshold=[0.1, None, -0.2, 0.0], score="tas-official", strict=True)


@pytest.fixture(scope="module")
def golden():
    return fastcar.load(GOLDEN / "tiny-vila-u")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "other")


@pytest.fixture
def other(folder):
    return fastcar.load(folder)


def changed(folder, path, change):
    """A copy of a checkpoint with one config changed."""
    config = json.loads((folder / path).read_text())
    change(config)
    (folder / path).write_text(json.dumps(config))
    return folder


def test_the_family_is_told_by_the_config(other, folder):
    assert other.model.family == "vila_u_llama" and other.model.name == "other"
    config = other.model.config
    assert (config.decoder.kv_heads, config.decoder.rms_norm_eps, config.decoder.rope_theta) == (3, 1e-3, 500.0)
    assert other.model.geometry(4).tokens_per_frame == 6 and other.model.frames == 4


def test_a_clip_of_other_sizes(other):
    clip = other(PROMPTS[0], seed=3, replay=0.5)
    assert clip.frames.shape == (4, 8, 12, 3) and clip.codes.shape == (4, 6, 3)
    assert clip.codes.max() < 10 and len(np.unique(clip.codes)) > 3
    assert clip.stats.replay.replay_ratio == pytest.approx(0.5, abs=0.2)


def test_one_frame_is_an_image(other):
    image = other(PROMPTS[0], frames=1, seed=1)
    assert image.frames.shape == (1, 8, 12, 3)
    assert template(" x ", 1).endswith("USER: x ASSISTANT: <im_start>") and template("x", 2).endswith("<vi_start>")
    assert other.model.token_ids(["x"], False, 1)[0][0, -1] == 384 - 4


def test_replayed_rows_are_not_computed():
    counted = [0] * 4

    def count(layer):
        return lambda module, inputs: counted.__setitem__(layer, counted[layer] + inputs[0].flatten(0, -2).shape[0])

    golden = fastcar.load(GOLDEN / "tiny-vila-u", engine="reference")  # whose modules can be watched
    blocks = list(golden.model.decoder.blocks())
    hooks = [block.mlp.register_forward_pre_hook(count(n)) for n, block in enumerate(blocks)]
    clip = golden(PROMPTS[0], replay=OFFICIAL, frames=4)
    for hook in hooks:
        hook.remove()
    replayed = clip.trace.replayed.sum((0, 2))
    prompt = golden.model.token_ids(PROMPTS[:1], True, 4)[0].numel()
    assert replayed.sum() > 0 and replayed[1] == 0
    assert counted == [prompt + 2 * 63 - int(n) for n in replayed]


def test_calls_leave_nothing_behind_and_rows_do_not_meet(golden):
    options = {"replay": OFFICIAL, "frames": 3}
    alone = golden(PROMPTS[0], seed=5, **options)
    pair = golden.batch(PROMPTS, [5, 6], **options)  # another batch size, and other padding
    again = golden(PROMPTS[0], seed=5, **options)
    assert (again.codes == alone.codes).all() and (again.trace.replayed == alone.trace.replayed).all()
    assert np.array_equal(again.trace.scores, alone.trace.scores, equal_nan=True)
    assert (pair[0].codes == alone.codes).all() and (pair[0].trace.replayed == alone.trace.replayed).all()
    np.testing.assert_allclose(pair[0].trace.scores, alone.trace.scores, atol=1e-4)


def test_in_bfloat16_score_and_threshold_are_bfloat16():
    pipe = fastcar.load(GOLDEN / "tiny-vila-u", dtype="bfloat16")
    assert {p.dtype for p in pipe.model.depth_head.parameters()} == {torch.bfloat16}
    free = pipe(PROMPTS[0], frames=2, replay=ReplayConfig(threshold=math.inf, score="tas-official"))
    scores = torch.from_numpy(free.trace.scores[16:])
    assert torch.equal(scores, scores.bfloat16().float())
    value = float(scores[0, 0, 0])
    nearly = value * (1 + 1e-4)  # rounds to the score itself: strictly above replays nothing, at it does
    for strict, replays in ((True, False), (False, True)):
        config = ReplayConfig(threshold=[nearly, None, None, None], score="tas-official", strict=strict)
        assert pipe(PROMPTS[0], frames=2, replay=config).trace.replayed[16, 0, 0] == replays


def test_a_prompt_beyond_what_the_decoder_was_trained_on_is_warned_of(golden):
    assert golden.model.check_prompt(PROMPTS[0]) == []
    (warning,) = golden.model.check_prompt("a " * 5000)
    assert "but tiny-vila-u was trained on 4096" in warning


def test_codebooks_by_depth_and_resized_latents(other):
    codec = other.model.codec
    codes = torch.randint(10, (2, 6, 3))
    vectors = codec.vectors(codes)
    for d in range(3):
        assert torch.equal(vectors[..., d, :], codec.codebooks[d].weight[codes[..., d]])
    z = vectors.sum(2).view(2, 3, 2, 20).permute(0, 3, 1, 2)
    expected = F.interpolate(z, size=(4, 6), mode="bilinear", align_corners=False)
    torch.testing.assert_close(codec.latents(codes), expected)
    assert len(codec.decoder.up[0]["block"]) == 3
    assert [len(level["attn"]) for level in codec.decoder.up] == [3, 0]  # attention at resolution 8 alone


def test_the_depth_heads_cache_changes_nothing(other):
    head = other.model.depth_head
    hidden, codes, seen = torch.randn(5, 48), torch.randint(10, (5, 3)), []

    def choose(depth, logits):
        seen.append(logits)
        return codes[:, depth]

    assert torch.equal(head.sample(hidden, choose), codes)
    torch.testing.assert_close(torch.stack(seen, 1), head.logits(hidden, codes))


def test_shards_and_bins_give_the_same_model(other, folder, tmp_path):
    expected = other(PROMPTS[0], frames=2).codes
    sharded, binary = (shutil.copytree(folder, tmp_path / name) for name in ("sharded", "binary"))
    for part in ("llm", "vision_tower", "mm_projector"):
        tensors = load_file(folder / part / "model.safetensors")
        for copied in (sharded, binary):
            (copied / part / "model.safetensors").unlink()
        torch.save(tensors, binary / part / "pytorch_model.bin")
        shards = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
        for shard in set(shards.values()):
            save_file({k: v for k, v in tensors.items() if shards[k] == shard}, sharded / part / shard)
        (sharded / part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for copied in (sharded, binary):
        assert (fastcar.load(copied)(PROMPTS[0], frames=2).codes == expected).all()


def test_special_tokens_and_spaces_in_prompts():
    tokenizer = LlamaTokenizer(GOLDEN / "tiny-vila-u" / "llm")
    bos, eos, start = 1, 2, 382
    ids = tokenizer.encode("a</s> b<vi_start>c")
    assert ids[0] == bos and eos in ids and start in ids
    pieces = [tokenizer.pieces.id_to_piece(i) if i < 380 else "" for i in ids]
    assert pieces[1] == "▁a" and pieces[pieces.index("</s>") + 1].startswith("▁")
    assert not pieces[ids.index(start) + 1].startswith("▁")  # no space that the text has not
    assert template("  a   cat\n", 8).count("USER: a   cat ASSISTANT:") == 1


def test_frames_to_codes_where_the_checkpoint_holds_the_encoder(folder, tmp_path):
    frames = torch.randint(256, (2, 4, 6, 6, 3), dtype=torch.uint8)
    with pytest.raises(ValueError, match="holds no SigLIP encoder"):
        fastcar.load(folder).model.codec.encode(frames)
    copied = shutil.copytree(folder, tmp_path / "copy")
    siglip = add_encoder(copied)
    codec = fastcar.load(copied).model.codec
    before = len(codec.state_dict())
    codes = codec.encode(frames)
    assert codes.shape == (2, 4, 9, 3) and len(codec.state_dict()) == before
    pixels = frames.flatten(0, 1).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        hidden = siglip((pixels - 0.5) / 0.5, output_hidden_states=True).hidden_states[-2].view(2, 4, 9, 20)
    rest = hidden
    for depth in range(3):
        book = codec.codebooks[depth].weight[:10]
        nearest = (rest[..., None, :] - book).pow(2).sum(-1).argmin(-1)
        assert torch.equal(codes[..., depth], nearest)
        rest = rest - book[nearest]
    with pytest.raises(ValueError, match=r"must be \[n, 6, 6, 3\]"):
        codec.encode(frames[:, :, :4])
    shutil.rmtree(copied / "vision_tower" / "siglip-tiny")
    with pytest.raises(ValueError, match=r"put the config\.json of the SigLIP model 'google/siglip-tiny' there"):
        fastcar.load(copied).model.codec.encode(frames)


def test_generating_from_the_command_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--model", str(folder), "--frames", "2", "--threshold", "0", "--score", "tas-official", "--json"]
    assert main(["generate", PROMPTS[0], "-o", "clip.gif", *words]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["height"], document["width"], document["frames"]) == (8, 12, 2)
    assert main(["generate", "  ", "-o", "clip.gif", *words]) == 2
    assert "no words" in capsys.readouterr().err


def remove(key):
    return lambda config: config.pop(key)


@pytest.mark.parametrize(
    ("path", "change", "shown"),
    [
        ("config.json", remove("llm_cfg"), "llm_cfg"),
        ("config.json", lambda c: c.update(model_type="vila_z"), "'vila_z'"),
        ("llm/config.json", remove("num_hidden_layers"), "num_hidden_layers"),
        ("llm/config.json", lambda c: c.update(rope_scaling={"type": "linear"}), "rope_scaling must be None"),
        ("llm/config.json", lambda c: c.update(num_key_value_heads=4), "heads"),
        ("llm/config.json", lambda c: c.update(intermediate_size=96), r"gate_proj.weight' must be \[96, 48\], got"),
        ("llm/config.json", lambda c: c.update(num_hidden_layers=10**9), "holds no tensor 'model.layers.999999999"),
        ("llm/config.json", lambda c: c.update(num_attention_heads=0), "num_attention_heads must be .* got 0"),
        ("llm/config.json", lambda c: c.update(hidden_size="big"), "hidden_size|malformed"),
        ("vision_tower/config.json", lambda c: c["rqtransformer"].update(vocab_size=11), "codebook size 11"),
        ("vision_tower/config.json", lambda c: c["rqvaesiglip"]["ddconfig"].pop("ch"), "'ch'"),
        ("vision_tower/config.json", lambda c: c["rqvaesiglip"]["ddconfig"].update(give_pre_end=True), "give_pre_end"),
        ("mm_projector/config.json", lambda c: c.update(mm_projector_type="linear"), "'linear'"),
    ],
)
def test_a_wrong_config_is_named(folder, tmp_path, path, change, shown):
    copied = changed(shutil.copytree(folder, tmp_path / "copy"), path, change)
    with pytest.raises(ValueError, match=shown):
        fastcar.load(copied)


def leaves(value, path=()):
    """Paths of everything in nested dictionaries."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from leaves(inner, (*path, key))


@pytest.mark.parametrize("part", ["config.json", "llm/config.json", "vision_tower/config.json"])
def test_no_config_escapes_as_another_error(folder, tmp_path, part):
    copied = shutil.copytree(folder, tmp_path / "copy")
    text = (folder / part).read_text()
    for path in leaves(json.loads(text)):
        for bad in (None, "x", -1, 0, 1.5, [], True, math.nan, 10**9):
            config = json.loads(text)
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = bad
            (copied / part).write_text(json.dumps(config))
            with contextlib.suppress(ValueError):
                read_config(copied)
                fastcar.load(copied)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("llm", "llm is missing"),
        ("vision_tower/config.json", r"vision_tower.config\.json is missing"),
        ("llm/tokenizer.model", r"tokenizer\.model is missing"),
        ("mm_projector/model.safetensors", "mm_projector holds no weights"),
    ],
)
def test_missing_parts_are_named(folder, tmp_path, path, shown):
    copied = shutil.copytree(folder, tmp_path / "copy")
    gone = copied / path
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(ValueError, match=shown):
        fastcar.load(copied)


def test_damaged_parts_are_named(folder, tmp_path):
    for path, shown in (
        ("llm/model.safetensors", "llm.model.safetensors is damaged"),
        ("llm/tokenizer.model", "SentencePiece"),
    ):
        copied = shutil.copytree(folder, tmp_path / path.replace("/", "-"))
        (copied / path).write_bytes((copied / path).read_bytes()[:100])
        with pytest.raises(ValueError, match=shown):
            fastcar.load(copied)


def test_wrong_replay_settings_are_named(golden):
    for config, shown in (
        (ReplayConfig(threshold=[0.0, 1.0], score="tas"), "2 values"),
        (ReplayConfig(threshold=0.0, tokens_per_frame=9), "tokens_per_frame=9"),
    ):
        with pytest.raises(ValueError, match=shown):
            golden(PROMPTS[0], frames=2, replay=config)


def test_a_hub_id_that_cannot_be_had_says_what_to_do(tmp_path):
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}  # read when the library is imported
    words = [sys.executable, "-m", "fastcar", "generate", "a cat", "--model", "mit-han-lab/vila-u-7b-256"]
    done = subprocess.run(words, capture_output=True, text=True, env=offline, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "run 'hf download mit-han-lab/vila-u-7b-256 --local-dir vila-u-7b-256'" in done.stderr
    with pytest.raises(FileNotFoundError, match="no model 'vila-u-7b'"):
        fastcar.load("vila-u-7b")


def test_a_hub_id_in_the_cache_is_loaded(folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name: str(folder) if name == "someone/model" else None)
    assert fastcar.load("someone/model").model.family == "vila_u_llama"


def test_configs_of_this_file_differ_from_the_golden_one_everywhere():
    golden_llm = json.loads((GOLDEN / "tiny-vila-u/llm/config.json").read_text())
    same = [k for k, v in LLM.items() if k not in ("model_type", "vocab_size") and golden_llm[k] == v]
    assert not same and VISION["rqvaesiglip"]["shared_codebook"] is False

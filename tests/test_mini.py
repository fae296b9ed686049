"""The mini family: its codec, words, network and checkpoint."""

import json

import pytest
import torch

import fastcar
from fastcar.decoder.config import DecoderConfig
from fastcar.models.mini.codec import CodecConfig, MiniCodec
from fastcar.models.mini.text import WordTokenizer
from fastcar.replay import ReplayConfig

from .conftest import tiny_parts

PROMPT = "a red circle moving right over a plain navy background"


def test_residual_quantisation_by_hand():
    codec = MiniCodec(CodecConfig(size=8, depth=2, codebook_size=3, latent_dim=2, width=4))
    codec.codebook.copy_(torch.tensor([[4.0, 0.0], [0.0, 1.0], [0.5, 0.0]]))
    codes = codec.quantise(torch.tensor([[4.4, 0.1], [0.1, 0.9]]))
    # 4.4 = 4 + .4, nearest .5; (.1, .9) = (0, 1) + (.1, -.1), nearest (.5, 0)
    assert codes.tolist() == [[0, 2], [1, 2]]
    assert codec.embed(codes).tolist() == [[4.5, 0.0], [0.5, 1.0]]


def test_codec_shapes():
    codec = MiniCodec(CodecConfig(size=32, codebook_size=8, latent_dim=4, width=8))
    frames = torch.randint(0, 256, (2, 3, 32, 32, 3), dtype=torch.uint8)
    codes = codec.encode(frames)
    assert codes.shape == (2, 3, 16, 2)
    back = codec.decode(codes)
    assert back.shape == frames.shape and back.dtype == torch.uint8


def test_encoder_sees_sixteen_pixels_and_no_more():
    """A change elsewhere in the picture leaves a token's latent bit for bit alone."""
    codec = MiniCodec(CodecConfig(size=64, width=8)).eval()
    x = torch.randn(1, 3, 64, 64)
    y = x.clone()
    y[:, :, :, 32 + 16 :] += 1
    same = (codec.latents(x) == codec.latents(y)).all(-1)[0].view(8, 8)
    assert same[:, :5].all() and not same[:, 6:].any()


@pytest.mark.parametrize(
    ("values", "named"), [({"size": 60}, "size"), ({"depth": 0}, "depth"), ({"codebook_size": 0}, "codebook_size")]
)
def test_codec_config_names_bad_values(values, named):
    with pytest.raises(ValueError, match=named):
        CodecConfig(**values)


def test_words():
    tokenizer = WordTokenizer(["blue", "cat", "red"], max_words=5)
    assert tokenizer.encode("A Red, cat!").tolist() == [0, 2, 5, 4, 1]
    assert tokenizer.encode("").tolist() == [0, 0, 0, 0, 1]
    assert tokenizer.unknown("a rad xyz cat rad xyz") == {"a": ["cat"], "rad": ["red"], "xyz": []}
    with pytest.raises(ValueError, match=r"5 words.*at most 4"):
        tokenizer.encode("red red red red red")


def test_incremental_inputs_equal_parallel_inputs(tiny_reference):
    """What the pipeline feeds step by step is what training fed at once, across frame borders."""
    model, config = tiny_reference.model.model, tiny_reference.model.config
    codes = torch.randint(0, 24, (1, 4 * 16, 2))
    words = tiny_reference.model.tokenizer.encode(PROMPT)[None]
    parallel = model.inputs(words, codes)
    prompts = tiny_reference.model.prompts([PROMPT], guided=False, frames=4)
    torch.testing.assert_close(prompts.embeds, parallel[:, : config.max_words])
    for token in range(1, 64):
        got = tiny_reference.model.next_input(prompts, codes[:, :token])
        torch.testing.assert_close(got, parallel[:, config.max_words + token - 1], msg=f"token {token}")


def test_inputs_do_not_see_their_target_or_later(tiny_reference):
    model = tiny_reference.model.model
    words = tiny_reference.model.tokenizer.encode(PROMPT)[None]
    codes = torch.randint(0, 24, (1, 64, 2))
    other = codes.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 24
    p = tiny_reference.model.config.max_words
    a, b = model.inputs(words, codes), model.inputs(words, other)
    assert torch.equal(a[:, : p + 20], b[:, : p + 20]) and not torch.equal(a[:, p + 20], b[:, p + 20])


def test_depth_head_is_causal_over_depth(tiny_reference):
    head = tiny_reference.model.model.depth_head
    hidden = torch.randn(5, 32)
    codes = torch.randint(0, 24, (5, 1))
    both = head(hidden, codes)
    torch.testing.assert_close(both[:, :1], head(hidden, codes[:, :0]))
    assert both.shape == (5, 2, 24)
    assert not torch.allclose(both[:, 1], head(hidden, (codes + 1) % 24)[:, 1])


def test_share_of_mlp_weights_is_that_of_real_models():
    c = DecoderConfig(hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128, intermediate_size=11008)
    assert c.layers * c.mlp_weights == 4_328_521_728 and c.layers * c.attention_weights == 2_147_483_648
    from fastcar.models.mini.model import MiniConfig

    mini = MiniConfig(words=("a",)).decoder
    assert mini.mlp_weights / (mini.mlp_weights + mini.attention_weights) >= 2 / 3


def test_checkpoint_round_trip(tiny_reference, tiny_config):
    model, _ = tiny_parts(tiny_config)
    for name, value in tiny_reference.model.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert tiny_reference.model.config == tiny_config


@pytest.fixture
def damaged(tiny_folder, tmp_path):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(tiny_folder, folder)
    return folder


def _change(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_a_flipped_bit_is_noticed(damaged):
    path = damaged / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        fastcar.load(damaged)


def test_missing_weights_are_named(damaged):
    (damaged / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        fastcar.load(damaged)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda c: c.update(family="other"), "family 'other'"),
        (lambda c: c["model"]["decoder"].update(layers=4), "do not fit"),
        (lambda c: c["model"].update(colour=1), "do not fit"),
        (lambda c: c.pop("model"), "do not fit"),
        (lambda c: c.pop("sha256"), "damaged"),
        (lambda c: c.update(family=["fastcar-mini"]), "family"),
        (lambda c: c.update(sampling={"foo": 1}), "foo"),
        (lambda c: c.update(sampling=None), "do not fit"),
        (lambda c: c.update(sampling={"temperature": "x"}), "temperature"),
        (lambda c: c.update(replay={"foo": 1}), "foo"),
        (lambda c: c.update(replay={"max_age": 0}), "max_age"),
        (lambda c: c["model"].update(words=[1, 2]), "words"),
        (lambda c: c["model"].update(max_words="28"), "max_words"),
        (lambda c: c["model"]["decoder"].update(rope_theta="x"), "rope_theta"),
    ],
)
def test_a_config_that_does_not_fit_is_named(damaged, change, shown):
    _change(damaged, change)
    with pytest.raises(ValueError, match=shown) as caught:
        fastcar.load(damaged)
    assert "\n" not in str(caught.value)


def test_no_such_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model 'nope'"):
        fastcar.load("nope")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        fastcar.load(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match="not a JSON object"):
        fastcar.load(tmp_path)


def test_recommended_replay_comes_from_the_checkpoint(tiny):
    assert tiny.model.recommended_replay(0.8) == ReplayConfig(target_ratio=0.8, score="input", tie_guidance=True)

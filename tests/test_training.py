"""Training: tiny, deterministic, resumable, and replay-aware as decoding is."""

import dataclasses

import numpy as np
import pytest
import torch

from fastcar.decoder.reference import ReferenceDecoder
from fastcar.models.mini.codec import CodecConfig
from fastcar.models.mini.text import WordTokenizer
from fastcar.replay import ReplayConfig
from fastcar.training.checkpoint import load_checkpoint, pack, save_checkpoint, unpack
from fastcar.training.decoder import (
    CodeClips,
    draw_batch,
    emphasis,
    encode_clips,
    feed_own,
    own_draws,
    train_decoder,
)
from fastcar.training.muon import Float32Muon
from fastcar.training.replay_aware import alignment_loss, replay_aware_pass
from fastcar.training.settings import DecoderTraining, TokenizerTraining
from fastcar.training.tokenizer import train_tokenizer

from .conftest import tiny_parts


class Squares:
    """Clips of 32x32 with a square that moves."""

    def __len__(self):
        return 8

    def __repr__(self):
        return "Squares()"

    def get(self, index):
        frames = np.zeros((4, 32, 32, 3), np.uint8)
        for t, frame in enumerate(frames):
            frame[8:16, 4 * t : 4 * t + 8, index % 3] = 255
        return frames, "a red square moving right"


TOKENIZER = TokenizerTraining(steps=6, batch=4, pool=4, refresh=3, unquantised=2)
CODEC = CodecConfig(size=32, codebook_size=24, latent_dim=8, width=16)


def test_tokenizer_is_deterministic_and_resumes_where_it_stopped(tmp_path):
    clips = Squares()
    whole, _ = train_tokenizer(CODEC, TOKENIZER, clips, clips, tmp_path / "a", save_every=100)
    with pytest.raises(RuntimeError, match="stop"):
        train_tokenizer(CODEC, TOKENIZER, clips, clips, tmp_path / "b", save_every=3, log=_stop)
    # the log of step 3 stops it before the checkpoint, so the run starts again; then one that stops after it
    train_tokenizer(CODEC, TOKENIZER, clips, clips, tmp_path / "b", save_every=3)
    state, header = load_checkpoint(tmp_path / "b")
    assert header["step"] == 6
    for name, value in whole.state_dict().items():
        assert torch.equal(value, state["codec"][name]), name
    with pytest.raises(ValueError, match="other settings"):
        train_tokenizer(CODEC, dataclasses.replace(TOKENIZER, seed=1), clips, clips, tmp_path / "b")


def _stop(line):
    raise RuntimeError("stop")


def _data(config, clips=6):
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(0, config.codec.codebook_size, (clips, 64, 2), generator=rng)
    words = WordTokenizer(config.words, config.max_words).encode("a red circle moving right").repeat(clips, 1)
    return CodeClips(codes, words)


def test_decoder_learns_is_deterministic_and_resumes(tmp_path, tiny_config):
    data = _data(tiny_config)
    training = DecoderTraining(steps=8, clips=2, first_frames=2, warmup=2)
    lines = []

    def run(name, steps, save_every=4):
        settings = dataclasses.replace(training, steps=steps, decay_from=training.decay_from * 8 / steps)
        return train_decoder(
            tiny_config,
            settings,
            data,
            data,
            data,
            tmp_path / name,
            compile=False,
            save_every=save_every,
            log=lines.append,
        )

    whole = run("a", 8)
    run("b", 4)
    resumed = run("b", 8)
    # the schedule of a run that was to end at step 4 differs, so compare with one interrupted, not shortened
    assert load_checkpoint(tmp_path / "b")[1]["step"] == 8
    again = run("c", 8)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert resumed is not None
    first, last = (float(line.split()[3]) for line in (lines[0], lines[1]))
    assert last < first
    with pytest.raises(ValueError, match="other settings"):
        train_decoder(
            tiny_config, dataclasses.replace(training, seed=3), data, data, data, tmp_path / "a", compile=False
        )


def test_an_interrupted_decoder_run_ends_as_if_it_had_not_been(tmp_path, tiny_config):
    data = _data(tiny_config)
    training = DecoderTraining(steps=6, clips=2, first_frames=1, warmup=2)

    def run(name, log=None):
        return train_decoder(
            tiny_config, training, data, data, data, tmp_path / name, compile=False, save_every=3, log=log
        )

    whole = run("a")
    with pytest.raises(RuntimeError, match="stop"):
        run("b", _stop)  # saved at step 3, then stopped
    assert load_checkpoint(tmp_path / "b")[1]["step"] == 3
    for name, value in run("b").state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


def test_a_batch_blanks_captions_and_corrupts_only_what_is_fed(tiny_config):
    data = _data(tiny_config, clips=50)
    training = DecoderTraining(drop_caption=0.5, corrupt=0.5)
    words, target, fed = draw_batch(data, 400, 64, training, 24, torch.Generator().manual_seed(0))
    blank = (words[:, :-1] == 0).all(1)
    assert 0.4 < blank.float().mean() < 0.6 and (words[:, -1] == 1).all()
    wrong = (fed != target).any(-1).float().mean()
    assert 0.2 < wrong < 0.3  # half of .5 on average
    assert all((data.codes == row).all((1, 2)).any() for row in target[:5])


def test_codes_are_read_back_and_made_anew_for_another_codec(tmp_path, tiny_config):
    _, codec = tiny_parts(tiny_config)
    tokenizer = WordTokenizer(tiny_config.words, tiny_config.max_words)
    path = tmp_path / "codes"
    made = encode_clips(codec, tokenizer, Squares(), 0, 3, path)
    assert made.codes.shape == (3, 64, 2)
    assert torch.equal(encode_clips(codec, tokenizer, Squares(), 0, 3, path).codes, made.codes)
    firsts = encode_clips(codec, tokenizer, Squares(), 0, 3, path, first_frames=True)
    assert torch.equal(firsts.codes, made.codes[:, :16])
    codec.codebook.neg_()
    assert not torch.equal(encode_clips(codec, tokenizer, Squares(), 0, 3, path).codes, made.codes)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_replay_aware_pass_equals_decoding(tiny_config, ratio):
    """Dense, and with all replayed: the parallel scan gives what the decoder gives step by step."""
    model, _ = tiny_parts(tiny_config)
    data = _data(tiny_config, clips=2)
    embeds = model.inputs(data.words, data.codes).detach()
    p, n = tiny_config.max_words, 16
    got = replay_aware_pass(model.decoder, embeds, p, n, ratio)
    from fastcar.geometry import Geometry

    decoder = ReferenceDecoder(model.decoder)
    geometry = Geometry(4, n, prefix=p)
    replay = ReplayConfig(threshold=float("-inf") if ratio else float("inf"), score="tas")
    hidden = [decoder.prefill(embeds[:, :p], geometry, replay=replay)]
    hidden += [decoder.step(embeds[:, p + s]) for s in range(geometry.steps)]
    torch.testing.assert_close(got.hidden[:, p - 1 :], torch.stack(hidden, 1), atol=2e-5, rtol=0)
    scores = torch.from_numpy(decoder.trace().scores[n:]).permute(1, 2, 0)
    torch.testing.assert_close(got.tas, scores, atol=1e-4, rtol=0)


def test_the_scan_replays_the_share_it_is_asked_for_and_compares_with_the_source(tiny_config):
    from fastcar.training.replay_aware import _replayed

    # one row, one token a frame, no prefix: B replays A; C is compared with A
    a, b, c = torch.tensor([[1.0, 1]]), torch.tensor([[1.0, 0.9]]), torch.tensor([[-1.0, 1]])
    m = torch.stack((a, b, c), 1)
    y = torch.tensor([[[10.0, 0], [20.0, 0], [30.0, 0]]])
    assert _replayed(m, y, 0, 1, 1.0)[0, :, 0].tolist() == [10, 10, 10]
    assert _replayed(m, y, 0, 1, 0.5)[0, :, 0].tolist() == [10, 10, 10]  # of one token, the best half is it


def test_alignment_loss_by_hand():
    change = torch.tensor([[[0.0, 1.0, 2.0]]])
    assert alignment_loss(-change, change).item() == pytest.approx(0, abs=1e-5)
    assert alignment_loss(change, change).item() == pytest.approx(2, abs=1e-5)


def test_nested_state_survives_a_file(tmp_path):
    state = {"optimiser": {0: {"step": torch.tensor(3.0), "m": torch.ones(2)}}, "n": {"k": 4}}
    assert unpack(*pack(state))["optimiser"][0]["step"] == 3
    save_checkpoint(tmp_path / "c", state, {"step": 5})
    back, header = load_checkpoint(tmp_path / "c")
    assert header == {"step": 5} and back["n"]["k"] == 4 and torch.equal(back["optimiser"][0]["m"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_broken_checkpoint_is_named(tmp_path):
    (tmp_path / "c").write_bytes(b"\x80\x04 no tensors")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        load_checkpoint(tmp_path / "c")


def test_emphasised_words_are_drawn_more_often(tiny_config):
    tokenizer = WordTokenizer(tiny_config.words, 4)
    captions = ["a red circle", "a red circle circling", "a red circle diagonally", "a red circle circling diagonally"]
    words = torch.stack([WordTokenizer(tiny_config.words, 8).encode(caption) for caption in captions])
    data = CodeClips(torch.arange(4)[:, None, None].expand(4, 2, 2), words)
    training = DecoderTraining(emphasis=("circling=6", "diagonally=2"), drop_caption=0.0, corrupt=0.0)
    weights = emphasis(data, training, tokenizer.words)
    assert weights.tolist() == [1, 6, 2, 6]
    drawn = draw_batch(data, 3000, 2, training, 24, torch.Generator().manual_seed(0), weights)[1][:, 0, 0]
    assert (drawn.bincount() / 3000).tolist() == pytest.approx([1 / 15, 6 / 15, 2 / 15, 6 / 15], abs=0.03)
    assert emphasis(data, DecoderTraining(), tokenizer.words) is None
    with pytest.raises(ValueError, match="'zebra'"):
        emphasis(data, DecoderTraining(emphasis=("zebra=2",)), tokenizer.words)
    with pytest.raises(ValueError, match="word=times"):
        DecoderTraining(emphasis=("circling",))


def test_own_draws_replace_a_share_of_what_is_fed(tiny_config):
    model, _ = tiny_parts(tiny_config)
    data = _data(tiny_config, clips=40)
    rng = torch.Generator().manual_seed(0)
    fed = feed_own(model, data.words, data.codes, data.codes, 1.0, rng, own_draws)
    other = (fed != data.codes).any(-1).float()
    assert 0.35 < other.mean() < 0.6 and other.mean(1).std() > 0.15  # half on average, each row its own share
    none = feed_own(model, data.words, data.codes, data.codes, 0.0, rng, own_draws)
    assert torch.equal(none, data.codes)


def test_own_draws_follow_the_models_distribution(tiny_config):
    """The first code of the first token, drawn many times, against the softmax of its logits (chi-square)."""
    model, _ = tiny_parts(tiny_config)
    data = _data(tiny_config, clips=1)
    words, codes = data.words.expand(3000, -1), data.codes[:, :1].expand(3000, -1, -1)
    noise = torch.rand(3000, 1, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        drawn = own_draws(model, words, codes, codes, noise)[:, 0, 0]
        hidden = model.decoder(model.inputs(words[:1], codes[:1]))[:, -1]
        expected = model.depth_head(hidden, codes[:1, 0, :0])[0, 0].softmax(-1) * 3000
    likely = expected > 5
    seen = torch.bincount(drawn, minlength=24).float()
    chi_square = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 2.5 * likely.sum()


def test_muon_in_float32_is_pytorchs_muon():
    torch.manual_seed(0)
    settings = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 32), (32, 64), (64, 32), (32, 32))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    begin = [p.detach().clone() for p in ours]
    optimisers = Float32Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    for a, b, before in zip(ours, theirs, begin, strict=True):
        assert (a - b).norm() < 0.03 * (b - before).norm()  # theirs is in bfloat16
    assert optimisers[0].state_dict()["state"].keys() == optimisers[1].state_dict()["state"].keys()

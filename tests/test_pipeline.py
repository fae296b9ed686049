import json
import math

import numpy as np
import pytest
import torch

import fastcar
from fastcar import ReplayConfig
from fastcar.sampling import GivenNoise, SeededNoise

PROMPT = "a red circle moving right over a plain navy background"
OTHER = "a large blue star spinning over a striped gray background"


def test_a_clip_and_its_numbers(tiny):
    clip = tiny(PROMPT, seed=3)
    assert clip.frames.shape == (4, 32, 32, 3) and clip.frames.dtype == np.uint8
    assert clip.codes.shape == (4, 16, 2)
    stats = clip.stats.to_dict()
    assert (stats["frames"], stats["height"], stats["width"], stats["seed"]) == (4, 32, 32, 3)
    assert stats["mlp_rows_total"] == 63 * 3 * 2 and stats["mlp_rows_replayed"] == 0
    assert stats["seconds"] >= stats["seconds_decode"] > 0
    assert stats["ms_per_token"] == pytest.approx(1000 * stats["seconds_decode"] / 63)
    assert "replay ratio 0.000" in str(clip.stats)


def test_a_seed_gives_one_clip_whatever_ran_before_or_beside(tiny):
    alone = tiny(PROMPT, seed=5)
    tiny(OTHER, seed=1, replay=0.9)
    beside = tiny.batch([OTHER, PROMPT, PROMPT], [1, 5, 6])
    np.testing.assert_array_equal(alone.codes, tiny(PROMPT, seed=5).codes)
    np.testing.assert_array_equal(alone.codes, beside[1].codes)
    assert (beside[2].codes != alone.codes).any()


def test_given_noise_draws_the_clip_again(tiny):
    seeded = SeededNoise([5, 6], 2, 24)
    noise = torch.stack([torch.from_numpy(seeded.at(n)).transpose(0, 1) for n in range(64)])
    for given in (noise, GivenNoise(noise)):
        for clip, seed in zip(tiny.batch([PROMPT, OTHER], [0, 0], noise=given), (5, 6), strict=True):
            np.testing.assert_array_equal(clip.codes, tiny(clip.stats.prompt, seed=seed).codes)
    first = tiny(PROMPT, noise=noise[:, :, :1], frames=2)  # more positions than needed
    np.testing.assert_array_equal(first.codes, tiny(PROMPT, seed=5, frames=2).codes)


def test_noise_for_another_clip_is_refused(tiny):
    noise = torch.ones(64, 2, 2, 24)
    for given, shown in (
        (noise[:, :, :1], r"for \(2, 2, 24\) clips, depths and codes, got \(1, 2, 24\)"),  # would broadcast
        (noise[..., :1], r"got \(2, 2, 1\)"),
        (noise.repeat(1, 2, 1, 1), r"got \(2, 4, 24\)"),
        (noise[:63], "63 positions"),
        (noise[0], r"\[positions, depth, clips, codes\], got torch.float32 \[2, 2, 24\]"),
        (noise.long(), "must be floats"),
        (noise - 1, "above zero"),
        (noise * torch.nan, "above zero"),
    ):
        with pytest.raises(ValueError, match=shown):
            tiny.batch([PROMPT, OTHER], [0, 0], noise=given)


@pytest.mark.parametrize("score", ["input", "tas", "tas-official", "random"])
def test_replayed_rows_do_not_depend_on_the_batch(tiny, score):
    replay = ReplayConfig(target_ratio=0.5, score=score)
    alone = tiny(PROMPT, seed=5, replay=replay)
    beside = tiny.batch([OTHER, PROMPT], [1, 5], replay=replay)[1]
    np.testing.assert_array_equal(alone.codes, beside.codes)
    np.testing.assert_array_equal(alone.trace.replayed, beside.trace.replayed)


def test_an_infinite_threshold_gives_the_dense_clip(tiny):
    dense, never = tiny(PROMPT), tiny(PROMPT, replay=ReplayConfig(threshold=math.inf))
    np.testing.assert_array_equal(dense.codes, never.codes)
    assert never.stats.replay.replay_ratio == 0


def test_everything_replayed(tiny):
    stats = tiny(PROMPT, replay=ReplayConfig(threshold=-math.inf)).stats.replay
    assert stats.replay_ratio == 1 and stats.both_rows_rate == 1
    assert stats.replay_share_of_all == pytest.approx(47 / 63)
    assert stats.mlp_reads_skipped == 47 * 3


def test_the_first_frame_never_depends_on_replay(tiny):
    a, b = tiny(PROMPT), tiny(PROMPT, replay=ReplayConfig(threshold=-math.inf))
    np.testing.assert_array_equal(a.frames[0], b.frames[0])


def test_streamed_frames_are_the_clips_frames(tiny):
    options = {"seed": 2, "replay": 0.5}
    np.testing.assert_array_equal(np.stack(list(tiny.stream(PROMPT, **options))), tiny(PROMPT, **options).frames)
    with pytest.raises(TypeError, match="colour"):
        next(tiny.stream(PROMPT, colour=1))


def test_numbers_of_any_integer_type_are_fine(tiny):
    clip = tiny(PROMPT, seed=np.int64(2), frames=np.int32(2))
    assert json.loads(json.dumps(clip.stats.to_dict()))["seed"] == 2


def test_without_guidance_a_clip_takes_one_row(tiny):
    stats = tiny(PROMPT, guidance=1.0, replay=ReplayConfig(threshold=0.9)).stats.replay
    assert stats.mlp_rows_total == 63 * 3 and len(stats.by_branch) == 1
    assert stats.both_rows_rate == stats.replay_ratio


def test_more_and_fewer_frames(tiny):
    assert tiny(PROMPT, frames=1).frames.shape[0] == 1
    six = tiny(PROMPT, frames=6)
    assert six.frames.shape[0] == 6
    np.testing.assert_array_equal(six.frames[:4], tiny(PROMPT).frames)


def test_progress_is_told_after_every_frame(tiny):
    told = []
    tiny(PROMPT, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_bfloat16(tiny_folder):
    clip = fastcar.load(tiny_folder, dtype="bfloat16")(PROMPT, replay=0.5)
    assert clip.frames.shape == (4, 32, 32, 3) and clip.stats.dtype == "bfloat16"


def test_runs_that_overlap_do_not_disturb_one_another(tiny):
    streams = [tiny.stream(PROMPT, seed=1, replay=0.5), tiny.stream(OTHER, seed=2)]
    first, second = (np.stack(frames) for frames in zip(*zip(*streams, strict=True), strict=True))
    np.testing.assert_array_equal(first, tiny(PROMPT, seed=1, replay=0.5).frames)
    np.testing.assert_array_equal(second, tiny(OTHER, seed=2).frames)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"replay": 1.5}, "1.5"),
        ({"replay": math.nan}, "nan"),
        ({"replay": ReplayConfig(threshold=[0.0, 1.0])}, "2 values"),
        ({"frames": 0}, "frames"),
        ({"temperature": -1.0}, "temperature"),
        ({"seed": -1}, "-1"),
        ({"seed": 0.5}, "0.5"),
        ({"seed": None}, "None"),
        ({"frames": 1.5}, "1.5"),
        ({"frames": True}, "True"),
        ({"frames": 10**12}, "GiB"),
        ({"replay": "0.5"}, "'0.5'"),
        ({"temperature": "a"}, "'a'"),
        ({"replay": ReplayConfig(threshold=0.0, tokens_per_frame=64)}, "16"),
    ],
)
def test_bad_options_are_shown(tiny, options, shown):
    with pytest.raises(ValueError, match=shown):
        tiny(PROMPT, **options)


def test_bad_prompts(tiny):
    with pytest.raises(ValueError, match="no words"):
        tiny(" ,")
    with pytest.raises(ValueError, match="no prompt"):
        tiny.batch([], [])
    with pytest.raises(ValueError, match="1 prompts need"):
        tiny.batch([PROMPT], [1, 2])
    with pytest.raises(ValueError, match="1 prompts need"):
        tiny.batch([PROMPT], 0)
    with pytest.raises(ValueError, match="list of texts"):
        tiny.batch("ab", [0, 1])
    with pytest.raises(ValueError, match="None"):
        tiny(None)
    with pytest.raises(TypeError, match="guidence"):
        tiny(PROMPT, guidence=None)
    with pytest.raises(ValueError, match="no words"):
        tiny.stream("")  # told at once, not at the first frame
    warnings = tiny.model.check_prompt("a rad circle")
    assert len(warnings) == 1 and "'rad'" in warnings[0] and "red" in warnings[0]


def test_bad_dtype_and_engine(tiny_folder):
    with pytest.raises(ValueError, match="float16"):
        fastcar.load(tiny_folder, dtype="float16")
    with pytest.raises(ValueError, match="warp"):
        fastcar.load(tiny_folder, engine="warp")

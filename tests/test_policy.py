import math

import numpy as np
import pytest
import torch

from fastcar.replay.policy import TargetRatioPolicy, ThresholdPolicy


def test_threshold_at_and_above():
    scores = np.float32([0.5, 0.25, 0.75])
    assert ThresholdPolicy([0.5], strict=False).decide(0, scores).tolist() == [True, False, True]
    assert ThresholdPolicy([0.5], strict=True).decide(0, scores).tolist() == [False, False, True]


def test_threshold_is_rounded_to_the_scores_dtype():
    # 0.1 in float32 is above the double 0.1; compared in float32 they are equal
    score = np.float32([0.1])
    assert ThresholdPolicy([0.1], strict=False).decide(0, score).item()
    assert not ThresholdPolicy([0.1], strict=True).decide(0, score).item()
    # in bfloat16 the nearest to 0.1 is 0.10009765625
    score = torch.tensor([0.1], dtype=torch.bfloat16).float().numpy()
    assert not ThresholdPolicy([0.1], strict=True, dtype=torch.bfloat16).decide(0, score).item()
    assert ThresholdPolicy([0.1], strict=True).decide(0, score).item()


def test_infinite_thresholds_mean_always_and_never():
    scores = np.float32([-1e30, math.inf])
    policy = ThresholdPolicy([-math.inf, math.inf], strict=False)
    assert policy.decide(0, scores).all() and not policy.decide(1, scores).any()


@pytest.mark.parametrize("target", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_target_ratio_is_met_whatever_the_scores(target, drift):
    """Scores of any scale, drifting upwards as replayed tokens' scores do."""
    layers, rows, steps = 4, 3, 448
    policy = TargetRatioPolicy([target] * layers, rows, window=64, steps=steps)
    rng = np.random.default_rng(0)
    done = np.zeros((layers, rows))
    for step in range(steps):
        scores = np.exp(rng.standard_normal((layers, rows))) * [[1.0], [1e3], [1e-3], [1.0]] + drift * step
        mask = np.stack([policy.decide(n, scores[n]) for n in range(layers)])
        policy.observe(scores, mask)
        done += mask
    assert np.abs(done.mean(0) / steps - target).max() < 0.02


@pytest.mark.parametrize("frames", [2, 3, 8])
def test_each_layer_meets_its_own_ratio(frames):
    """Also in a short clip, and beside layers that cannot meet theirs."""
    ratios = [1.0, 0.0, 0.5, 0.8]
    steps = 64 * (frames - 1)
    policy, rng = TargetRatioPolicy(ratios, 5, window=64, steps=steps), np.random.default_rng(0)
    done = np.zeros((4, 5))
    for _ in range(steps):
        scores = rng.standard_normal((4, 5), np.float32)
        mask = np.stack([policy.decide(n, scores[n]) for n in range(4)])
        mask[0] = False  # a limit that the policy does not know
        policy.observe(scores, mask)
        done += mask
    assert np.abs(done[1:].mean(1) / steps - ratios[1:]).max() < 0.04


@pytest.mark.parametrize("target", [0.25, 0.5, 0.8])
def test_pooled_layers_meet_the_ratio_together(target):
    """The layers with the higher scores give the most, and one that is excluded is left out of the count."""
    ratios, steps = [target, 0.0, target, target], 7 * 64
    policy, rng = TargetRatioPolicy(ratios, 3, window=64, steps=steps, pooled=True), np.random.default_rng(0)
    done = np.zeros((4, 3))
    for _ in range(steps):
        scores = rng.random((4, 3), np.float32) + np.float32([[0.0], [9.0], [0.2], [0.4]])
        mask = np.stack([policy.decide(n, scores[n]) for n in range(4)])
        policy.observe(scores, mask)
        done += mask
    done /= steps
    assert not done[1].any()
    assert (done[0] < done[2]).all() and (done[2] < done[3]).all()
    assert np.abs(done[[0, 2, 3]].mean(0) - target).max() < 0.02


def test_a_region_of_a_frame_may_compute_throughout():
    """Half of each frame changes: at a target of a half, all of the other half replays and nothing else does."""
    steps = 10 * 64
    policy, rng = TargetRatioPolicy([0.5], 1, window=64, steps=steps), np.random.default_rng(0)
    done = np.zeros((steps, 1), bool)
    for step in range(steps):
        score = rng.random((1, 1), np.float32) + (step // 32 % 2)
        done[step] = policy.decide(0, score[0])
        policy.observe(score, done[step : step + 1])
    late = done[3 * 64 : 9 * 64].reshape(-1, 2, 32)
    assert late[:, 0].mean() < 0.1 and late[:, 1].mean() > 0.9


def test_target_ratio_keeps_rows_apart():
    """A row decides alike whatever stands beside it."""
    scores = np.random.default_rng(1).standard_normal((100, 2, 3), np.float32)

    def run(columns):
        policy = TargetRatioPolicy([0.5, 0.5], len(columns), window=16)
        out = []
        for step in scores[..., columns]:
            mask = np.stack([policy.decide(n, step[n]) for n in range(2)])
            policy.observe(step, mask)
            out.append(mask)
        return np.stack(out)

    assert np.array_equal(run([0, 1, 2])[..., 1], run([1])[..., 0])


def test_layers_with_ratio_zero_never_replay():
    policy = TargetRatioPolicy([0.0, 1.0], 1, window=8)
    for _ in range(20):
        scores = np.ones((2, 1), np.float32)
        mask = np.stack([policy.decide(n, scores[n]) for n in range(2)])
        policy.observe(scores, mask)
        assert not mask[0].any()
    assert mask[1].all()

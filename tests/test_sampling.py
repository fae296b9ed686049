import math

import numpy as np
import pytest

from fastcar.sampling import SamplingConfig, SeededNoise, draw, guide, probabilities

LOGITS = np.float32([[2.0, 1.0, 1.0, 0.0]])


def test_guidance_by_hand():
    rows = np.float32([[1.0, 2.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.0]])  # two conditional, two blank
    assert guide(rows, 3.0).tolist() == [[-3.0, 6.0], [0.0, 3.0]]


def test_temperature():
    got = probabilities(LOGITS, SamplingConfig(temperature=0.5))
    expected = np.exp(LOGITS * 2) / np.exp(LOGITS * 2).sum()
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert got.dtype == np.float32
    assert probabilities(LOGITS, SamplingConfig(temperature=0)).tolist() == [[1, 0, 0, 0]]


def test_top_k_keeps_ties_at_the_border():
    got = probabilities(LOGITS, SamplingConfig(top_k=2))
    assert (got > 0).tolist() == [[True, True, True, False]]
    assert got.sum().item() == pytest.approx(1)


def test_top_p_keeps_what_reaches_the_mass_and_renormalises():
    probs = np.float32([[0.5, 0.3, 0.15, 0.05]])
    got = probabilities(np.log(probs), SamplingConfig(top_p=0.8 - 1e-6))
    np.testing.assert_allclose(got, [[0.625, 0.375, 0, 0]], rtol=1e-6)
    assert (probabilities(np.log(probs), SamplingConfig(top_p=1e-9)) > 0).tolist() == [[True, False, False, False]]


def test_draws_follow_the_probabilities():
    probs = np.float32([0.5, 0.3, 0.2])
    noise = SeededNoise([7], 1, 3)
    draws = np.stack([draw(probs[None], noise.at(position)[:, 0]) for position in range(4000)])
    expected = probs * 4000
    chi_square = ((np.bincount(draws.ravel(), minlength=3) - expected) ** 2 / expected).sum()
    assert chi_square < 13.8  # p = .001 at two degrees of freedom


def test_noise_depends_on_seed_and_position_alone():
    both, alone = SeededNoise([3, 5], 2, 8), SeededNoise([5], 2, 8)
    late = both.at(9)
    assert np.array_equal(late[1], alone.at(9)[0])
    assert not np.array_equal(late[0], late[1]) and not np.array_equal(late, both.at(8))
    assert np.array_equal(both.at(9), late) and (late > 0).all()
    fresh = np.random.Generator(np.random.Philox(key=5, counter=[0, 0, 0, 9]))
    assert np.array_equal(fresh.standard_exponential((2, 8), dtype=np.float32), late[1])


def test_impossible_codes_are_never_drawn():
    """Float32 Exp(1) noise may be exactly zero; seed 32 holds one."""
    noise = SeededNoise([32], 2, 512)
    zero = SamplingConfig(temperature=0)
    logits = np.random.default_rng(0).standard_normal((2, 512), np.float32)
    for position in range(512):
        at = noise.at(position)[0]
        assert (at > 0).all()
        assert np.array_equal(draw(probabilities(logits, zero), at), logits.argmax(-1))


def test_a_tiny_top_p_keeps_the_first():
    assert probabilities(np.float32([[0.0, 1.0]]), SamplingConfig(top_p=1e-300)).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"temperature": 1e-30},
        {"temperature": "warm"},
        {"guidance": 1e38},
        {"top_k": True},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"guidance": math.inf},
    ],
)
def test_bad_values_are_named(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        SamplingConfig(**values)


def test_bad_seed():
    with pytest.raises(ValueError, match="-1"):
        SeededNoise([-1], 1, 1)

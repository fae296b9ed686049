import math

import numpy as np
import pytest
import torch

from fastcar.replay.score import SCORES, LayerState, temporal_attention_score


def state(query, rotated, mlp_input):
    query, rotated = torch.tensor(query)[:, :, None], torch.tensor(rotated)[:, :, None]
    return LayerState(query, rotated, torch.zeros(1, 1, 1, 4), torch.tensor(mlp_input))


def test_temporal_attention_score_by_hand():
    query = torch.tensor([[[1.0, 2, 3, 4], [1, 0, 0, 0]]])
    key = torch.tensor([[[1.0, 1, 1, 1], [4, 9, 9, 9]]])
    # heads: 10 / sqrt(4) = 5 and 4 / sqrt(4) = 2; mean 3.5
    assert temporal_attention_score(query, key).tolist() == [3.5]


def test_grouped_queries_share_a_key():
    query = torch.tensor([[[2.0, 0, 0, 0], [4, 0, 0, 0]]])
    key = torch.tensor([[[1.0, 0, 0, 0]]])
    assert temporal_attention_score(query, key).tolist() == [1.5]


def test_variants_take_the_query_before_and_after_rotation():
    s = state([[[2.0, 0, 0, 0]]], [[[0.0, 6, 0, 0]]], [[0.0]])
    key = torch.tensor([[[1.0, 1, 0, 0]]])
    assert SCORES["tas-official"].compute(s, key).tolist() == [1.0]
    assert SCORES["tas"].compute(s, key).tolist() == [3.0]
    assert SCORES["tas-official"].strict and not SCORES["tas"].strict


def test_input_is_the_cosine_of_mlp_inputs():
    s = state([[[0.0] * 4]] * 2, [[[0.0] * 4]] * 2, [[3.0, 0.0], [1.0, 1.0]])
    got = SCORES["input"].compute(s, torch.tensor([[5.0, 0.0], [1.0, 0.0]]))
    assert got.tolist() == pytest.approx([1.0, math.sqrt(0.5)])


def test_random_is_uniform_and_repeatable():
    torch.manual_seed(0)
    s = LayerState(torch.zeros(0), torch.zeros(0), torch.zeros(0), torch.randn(4000, 16))
    got = SCORES["random"].compute(s, None)
    assert np.array_equal(got, SCORES["random"].compute(s, None))
    assert got.min() >= 0 and got.max() < 1
    assert got.mean().item() == pytest.approx(0.5, abs=0.02)
    assert (got < 0.25).mean().item() == pytest.approx(0.25, abs=0.03)

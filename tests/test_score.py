import math

import numpy as np
import pytest
import torch

from fastcar.replay.score import SCORES, LayerState, temporal_attention_score


def state(query, rotated, mlp_input):
    query, rotated = torch.tensor(query)[:, :, None], torch.tensor(rotated)[:, :, None]
    return LayerState(query, rotated, torch.zeros(1, 1, 1, 4), torch.tensor(mlp_input), 0, 0)


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


def test_random_is_uniform_repeatable_and_the_same_for_all_rows():
    def draw(step, layer):
        nothing = torch.zeros(0)
        return SCORES["random"].compute(LayerState(nothing, nothing, nothing, torch.randn(3, 16), step, layer), None)

    got = np.array([[draw(step, layer) for layer in range(8)] for step in range(500)])
    assert (got == got[..., :1]).all()
    assert np.array_equal(draw(7, 3), got[7, 3])
    values = got[..., 0].ravel()
    assert len(set(values.tolist())) > 3990
    assert values.min() >= 0 and values.max() < 1
    assert values.mean() == pytest.approx(0.5, abs=0.02)
    assert (values < 0.25).mean() == pytest.approx(0.25, abs=0.03)

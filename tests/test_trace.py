import contextlib

import numpy as np
import pytest

from fastcar.geometry import Geometry
from fastcar.replay import ReplayConfig, ReplayTrace


def small_trace():
    """Two frames of two tokens (3 steps), two layers, one pair; only step 2 can replay."""
    replayed = np.zeros((3, 2, 2), bool)
    replayed[2] = [[True, True], [True, False]]
    scores = np.full((3, 2, 2), np.nan, np.float32)
    scores[2] = [[0.9, 0.8], [0.7, 0.1]]
    return ReplayTrace(scores, replayed, Geometry(2, 2, prefix=3), ReplayConfig(threshold=0.5), pairs=True)


def test_statistics_by_hand():
    stats = small_trace().statistics()
    assert stats.replay_ratio == 3 / 4
    assert stats.replay_share_of_all == 3 / 12
    assert stats.both_rows_rate == 1 / 2
    assert (stats.mlp_rows_total, stats.mlp_rows_replayed) == (12, 3)
    assert (stats.mlp_reads_total, stats.mlp_reads_skipped) == (6, 1)
    assert stats.by_layer == (1.0, 0.5)
    assert stats.by_frame == (0.0, 0.75)
    assert stats.by_branch == (1.0, 0.5)


def test_saved_and_loaded_gives_the_same_statistics(tmp_path):
    trace = small_trace()
    trace.save(tmp_path / "t.npz")
    back = ReplayTrace.load(tmp_path / "t.npz")
    assert back.statistics() == trace.statistics()
    assert (back.geometry, back.config, back.pairs) == (trace.geometry, trace.config, trace.pairs)
    np.testing.assert_array_equal(back.scores, trace.scores)
    np.testing.assert_array_equal(back.replayed, trace.replayed)
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


def test_dense_trace_round_trips(tmp_path):
    trace = ReplayTrace.dense(Geometry(3, 4, prefix=1), layers=2, rows=1, pairs=False)
    trace.save(tmp_path / "t.npz")
    back = ReplayTrace.load(tmp_path / "t.npz")
    assert back.config is None and back.statistics().replay_ratio == 0
    assert back.statistics().mlp_rows_total == 11 * 2


def test_rows_are_taken_apart():
    assert small_trace().rows([0]).replayed.shape == (3, 2, 1)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04broken"])
def test_what_is_no_trace_is_named(tmp_path, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.npz is no replay trace"):
        ReplayTrace.load(path)


def test_a_damaged_trace_is_named_wherever_the_damage_lies(tmp_path):
    path = tmp_path / "t.npz"
    small_trace().save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with contextlib.suppress(ValueError):  # any other exception fails the test
            ReplayTrace.load(path)


def test_an_npz_of_something_else_is_named(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="no replay trace"):
        ReplayTrace.load(tmp_path / "x.npz")


def test_a_single_frame_has_nothing_to_replay():
    stats = ReplayTrace.dense(Geometry(1, 4), 2, 2, pairs=True).statistics()
    assert stats.replay_ratio == 0 and stats.by_frame == (0.0,)

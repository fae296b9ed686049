import pytest

from fastcar.geometry import Geometry


def test_counts():
    g = Geometry(frames=3, tokens_per_frame=4, prefix=5)
    assert (g.tokens, g.steps, g.positions) == (12, 11, 16)


def test_aligned_is_one_frame_back():
    g = Geometry(frames=3, tokens_per_frame=4)
    assert [g.aligned(s) for s in (3, 4, 9)] == [-1, 0, 5]
    assert [g.frame(s) for s in (0, 3, 4, 8)] == [0, 0, 1, 2]


def test_replay_begins_in_the_second_frame_and_spares_separators():
    g = Geometry(frames=2, tokens_per_frame=4, never_replay=(3,))
    assert [g.may_replay(s) for s in range(8)] == [False] * 4 + [True, True, True, False]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"frames": 0, "tokens_per_frame": 4}, "frames"),
        ({"frames": 1, "tokens_per_frame": 0}, "tokens_per_frame"),
        ({"frames": 1, "tokens_per_frame": 4, "prefix": -1}, "prefix"),
        ({"frames": 1, "tokens_per_frame": 4, "never_replay": (4,)}, "never_replay"),
    ],
)
def test_impossible_values_are_named(values, named):
    with pytest.raises(ValueError, match=named):
        Geometry(**values)


def test_a_lead_comes_before_the_frames():
    g = Geometry(frames=3, tokens_per_frame=4, prefix=2, never_replay=(1,), lead=5)
    assert (g.tokens, g.steps, g.positions) == (17, 16, 18)
    assert [g.frame(s) for s in (0, 4, 5, 8, 9, 15)] == [-2, -1, 0, 0, 1, 2]
    assert [s for s in range(g.steps) if g.may_replay(s)] == [9, 11, 12, 13, 15]
    assert g.aligned(9) == 5
    with pytest.raises(ValueError, match="lead"):
        Geometry(1, 4, lead=-1)

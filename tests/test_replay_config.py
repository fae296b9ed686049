import math

import pytest

from fastcar.replay import ReplayConfig


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({}, "exactly one"),
        ({"threshold": 1.0, "target_ratio": 0.5}, "exactly one"),
        ({"threshold": math.nan}, "nan"),
        ({"threshold": [0.0, math.nan]}, "nan"),
        ({"threshold": "-4"}, "'-4'"),
        ({"target_ratio": 1.5}, "1.5"),
        ({"target_ratio": -0.1}, "-0.1"),
        ({"target_ratio": math.nan}, "nan"),
        ({"target_ratio": True}, "True"),
        ({"threshold": 0.0, "score": "best"}, "'best'"),
        ({"threshold": 0.0, "max_age": 0}, "max_age"),
        ({"threshold": 0.0, "exclude_layers": [-1]}, "exclude_layers"),
        ({"threshold": 0.0, "exclude_layers": 3}, "exclude_layers"),
        ({"threshold": 0.0, "score": ["tas"]}, "tas"),
        ({"target_ratio": [0.5, None]}, "None"),
        ({"target_ratio": 0.5, "strict": True}, "strict"),
        ({"threshold": 0.0, "tokens_per_frame": 0}, "tokens_per_frame"),
    ],
)
def test_bad_values_are_shown(values, shown):
    with pytest.raises(ValueError, match=shown):
        ReplayConfig(**values)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"threshold": [0.0, 1.0]}, "2 values.*3 layers"),
        ({"target_ratio": [0.5] * 4}, "4 values.*3 layers"),
        ({"threshold": 0.0, "exclude_layers": [3]}, "exclude_layers"),
        ({"target_ratio": 0.8, "exclude_layers": [0]}, "at most 0.67"),
        ({"target_ratio": 0.8, "max_age": 1}, "at most 0.50"),
        ({"target_ratio": [0.1, 0.9, 0.1], "max_age": 1}, "at most 0.50"),
        ({"target_ratio": [0.1, 0.9, 0.1], "exclude_layers": [1]}, "at most 0.00"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(values, shown):
    with pytest.raises(ValueError, match=shown):
        ReplayConfig(**values).check(3)


def test_limits_depend_on_the_clips_length():
    config = ReplayConfig(target_ratio=0.6, max_age=1)
    config.check(3, frames=2)  # one frame may replay, and its outputs are of age 1
    with pytest.raises(ValueError, match=r"at most 0\.50"):
        config.check(3, frames=3)
    config.check(3, frames=4)  # compute, replay, compute, replay: two of three


def test_tokens_per_frame_must_be_the_models():
    config = ReplayConfig(threshold=0.0, tokens_per_frame=16)
    config.check(3, tokens_per_frame=16)
    with pytest.raises(ValueError, match="64"):
        config.check(3, tokens_per_frame=64)


def test_any_collection_of_layers_will_do():
    assert ReplayConfig(threshold=0.0, exclude_layers={1}).to_dict()["exclude_layers"] == [1]


def test_none_and_excluded_layers_never_replay():
    config = ReplayConfig(threshold=[-4.0, None, 2.0], exclude_layers=[2])
    assert config.thresholds(3) == [-4.0, math.inf, math.inf]


def test_other_layers_make_up_for_excluded_ones():
    assert ReplayConfig(target_ratio=0.5, exclude_layers=[0]).layer_ratios(3) == [0.0, 0.75, 0.75]


def test_round_trip():
    config = ReplayConfig(threshold=[1.0, None], score="tas-official", max_age=2, exclude_layers=[0])
    assert ReplayConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="speed"):
        ReplayConfig.from_dict({"threshold": 1.0, "speed": 9})

"""Limits against numpy, what enters the history, and a checkpoint's state with it and from before
it.
"""

import json
import math

import numpy as np
import pytest

from common.checkpoint.snapshot import TrainState
from common.config.schema import LoggingConfig
from common.training.engine import NO_LIMITS, Limits, limits_of, record_outlier

CALM = [5.0, 5.1] * 4
FOUR = LoggingConfig(outlier_deviations=4.0, outlier_window=8)


def after(losses: list[float], config: LoggingConfig) -> tuple[TrainState, list[bool]]:
    """The state after steps of these losses, whose gradient norms are twice as large, and which of
    them were outliers.
    """
    state = TrainState()
    return state, [record_outlier(state, config, loss, 2 * loss, skipped=False) for loss in losses]


def test_limits_are_the_mean_and_the_sample_deviation_of_the_last_window() -> None:
    """None before half a window, without spread, and when off, which also forgets."""
    config = LoggingConfig(outlier_deviations=3.0, outlier_window=16)
    losses = np.random.default_rng(0).normal(5.0, 0.1, 40).tolist()
    found = limits_of(after(losses, config)[0], config)
    last = np.array(losses[-16:])
    for value, history in ((found.loss, last), (found.grad_norm, 2 * last)):
        assert value == pytest.approx(history.mean() + 3 * history.std(ddof=1), rel=1e-6)
        assert value == np.float32(value)
    assert limits_of(after([1.0, 2.0, 3.0], FOUR)[0], FOUR) == NO_LIMITS
    assert limits_of(after([1.0, 2.0, 3.0, 4.0], FOUR)[0], FOUR).loss < 20.0
    assert limits_of(after([1.0] * 8, FOUR)[0], FOUR) == NO_LIMITS
    remembering = TrainState(losses=[1.0, 2.0] * 4, grad_norms=[1.0, 2.0] * 4)
    assert not record_outlier(remembering, LoggingConfig(), 1e9, 2.0, skipped=False)
    assert remembering == TrainState()


def test_only_what_is_far_above_is_an_outlier_and_it_enters_the_history() -> None:
    """A lasting change of level is let through once the history knows it. Values that are not
    finite are for the loss scale.
    """
    state, found = after([*CALM, 0.1, *CALM, 50.0], FOUR)
    assert found == [False] * 17 + [True]
    assert state.losses == [*CALM[1:], 50.0]
    assert after([*CALM, *[9.0, 9.1] * 4], FOUR)[1] == [False] * 8 + [True] + [False] * 7
    state, found = after([*CALM, math.nan, math.inf], FOUR)
    assert not any(found) and state.losses == CALM
    limits = Limits(loss=1.0, grad_norm=1.0)
    assert not limits.exceeded(math.inf, 2.0) and not limits.exceeded(2.0, math.nan)
    assert limits.exceeded(2.0, 0.5) and limits.exceeded(0.5, 2.0) and not limits.exceeded(1.0, 1.0)


def test_the_history_survives_a_manifest() -> None:
    state = TrainState(step=3, losses=[0.1 + 0.2, 1 / 3], grad_norms=[1e-30, 7.0])
    saved = json.loads(json.dumps(state.to_dict()))
    assert TrainState.from_dict(saved) == state
    old = {name: value for name, value in saved.items() if name not in ("losses", "grad_norms")}
    assert TrainState.from_dict(old) == TrainState(step=3)

"""Steps that a trace covers, with a trace that only takes notes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.checkpoint.state import TrainState
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.log import LOG
from common.resolve.derive import resolve_config
from common.training.profile import ProfileWindow


def make_config(**profile: int) -> RunConfig:
    tree = {
        "output_dir": "run",
        "model": {
            "num_layers": 1,
            "hidden_size": 8,
            "num_heads": 2,
            "seq_length": 4,
            "vocab_size": 50,
        },
        "train": {"max_steps": 10, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.1},
        "profile": profile,
    }
    return resolve_config(build_config(tree), samples_per_epoch=100)


def traced(profile: dict[str, int], done: int = 0, stop_after: int = 10) -> list[str]:
    """Events of a run from ``done`` that ends after ``stop_after``."""
    events: list[str] = []

    @contextmanager
    def trace(path: Path) -> Iterator[None]:
        events.append(str(path))
        yield
        events.append("written")

    with ProfileWindow(make_config(**profile), TrainState(step=done), trace) as window:
        for step in range(done + 1, stop_after + 1):
            window.begin(step)
            events.append(str(step))
            window.end(step)
    return events


def test_a_window_of_steps() -> None:
    name = "run/profile/steps_3_5_rank_0.json.gz"
    assert traced({"start": 3, "stop": 5}) == [
        "1",
        "2",
        name,
        "3",
        "4",
        "5",
        "written",
        "6",
        "7",
        "8",
        "9",
        "10",
    ]
    assert traced({"start": 3}, stop_after=4) == [
        "1",
        "2",
        "run/profile/steps_3_3_rank_0.json.gz",
        "3",
        "written",
        "4",
    ]
    assert traced({}, stop_after=2) == ["1", "2"]


def test_a_run_that_ends_or_begins_inside_the_window() -> None:
    assert traced({"start": 9, "stop": 99}, done=8) == [
        "run/profile/steps_9_10_rank_0.json.gz",
        "9",
        "10",
        "written",
    ]
    assert traced({"start": 2, "stop": 9}, done=1, stop_after=2) == [
        "run/profile/steps_2_9_rank_0.json.gz",
        "2",
        "written",
    ]
    assert traced({"start": 2, "stop": 5}, done=4, stop_after=6) == [
        "run/profile/steps_5_5_rank_0.json.gz",
        "5",
        "written",
        "6",
    ]


def test_a_window_that_is_done_or_never_comes(caplog: pytest.LogCaptureFixture) -> None:
    LOG.addHandler(caplog.handler)
    try:
        assert traced({"start": 2, "stop": 4}, done=4, stop_after=5) == ["5"]
    finally:
        LOG.removeHandler(caplog.handler)
    assert "steps 2 to 4 are done already" in caplog.text
    with pytest.raises(ConfigError, match=r"profile\.start=11 is beyond the last step, 10"):
        traced({"start": 11})


def test_a_trace_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    @contextmanager
    def no_disk(path: Path) -> Iterator[None]:
        yield
        raise OSError(28, "No space left on device")

    LOG.addHandler(caplog.handler)
    try:
        with (
            ProfileWindow(make_config(start=1), TrainState(), no_disk) as window,
            caplog.at_level(logging.WARNING),
        ):
            window.begin(1)
            window.end(1)
    finally:
        LOG.removeHandler(caplog.handler)
    assert "profile: no trace: [Errno 28] No space left on device" in caplog.text

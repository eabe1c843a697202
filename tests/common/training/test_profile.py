"""Steps that a trace covers, with a trace that only takes notes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.checkpoint.snapshot import TrainState
from common.errors import ConfigError
from common.training.steps import ProfileWindow
from tests.tiny import tiny_config


def traced(profile: dict[str, int], done: int = 0, stop_after: int = 10, *, full: bool = False) -> str:
    """Events of a run from ``done`` that ends after ``stop_after``. full: no trace is written."""
    events: list[str] = []

    @contextmanager
    def trace(path: Path) -> Iterator[None]:
        assert path.parent == Path("unused/profile")
        events.append(path.name.removesuffix("_rank_0.json.gz"))
        yield
        if full:
            raise OSError(28, "No space left on device")
        events.append("written")

    config = tiny_config(train__max_steps=10, profile=profile)
    with ProfileWindow(config, TrainState(step=done), trace) as window:
        for step in range(done + 1, stop_after + 1):
            window.begin(step)
            events.append(str(step))
            window.end(step)
    return " ".join(events)


@pytest.mark.parametrize(
    ("profile", "done", "stop", "events"),
    [
        ({"start": 3, "stop": 5}, 0, 10, "1 2 steps_3_5 3 4 5 written 6 7 8 9 10"),
        ({"start": 3}, 0, 4, "1 2 steps_3_3 3 written 4"),
        ({}, 0, 2, "1 2"),
        # a run that ends or begins inside the window
        ({"start": 9, "stop": 99}, 8, 10, "steps_9_10 9 10 written"),
        ({"start": 2, "stop": 9}, 1, 2, "steps_2_9 2 written"),
        ({"start": 2, "stop": 5}, 4, 6, "steps_5_5 5 written 6"),
    ],
)
def test_a_window_of_steps(profile: dict[str, int], done: int, stop: int, events: str) -> None:
    assert traced(profile, done, stop) == events


def test_a_window_that_is_done_never_comes_or_fails(caplog: pytest.LogCaptureFixture) -> None:
    """A trace that fails does not end the run."""
    assert traced({"start": 2, "stop": 4}, done=4, stop_after=5) == "5"
    assert "steps 2 to 4 are done already" in caplog.text
    with pytest.raises(ConfigError, match=r"profile\.start=11 is beyond the last step, 10"):
        traced({"start": 11})
    assert traced({"start": 1}, stop_after=2, full=True) == "steps_1_1 1 2"
    assert "profile: no trace: [Errno 28] No space left on device" in caplog.text

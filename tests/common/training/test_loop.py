"""The loop with an engine of a few lines that takes several steps at once, as a data sink does. Limits of outliers
against numpy; the steps that a trace covers.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.checkpoint.folders import find_checkpoint, whole_checkpoints
from common.checkpoint.manifest import read_manifest
from common.checkpoint.snapshot import TrainState
from common.config.schema import LoggingConfig
from common.dataset.sampler import Batch
from common.errors import ConfigError
from common.training.engine import NO_LIMITS, limits_of, record_outlier
from common.training.metrics import read_metrics
from common.training.steps import ProfileWindow, Steps
from tests.common.training.scripted import Scripted, batches, start
from tests.tiny import require_equal, rows_of, tiny_config


def run_loop(folder: Path, steps_per_run: int, late: bool = False, **changes: Any) -> Scripted:
    """Ten steps with losses 1, 1/2, 1/3, ..., of which the third is skipped."""
    usual: dict[str, Any] = {
        "train": {"max_steps": 10, "micro_batch_size": 2},
        "validation": {"interval": 4},
        "checkpoint": {"interval": 3, "keep": 0},
    }
    feed, own = changes.pop("feed", batches), {"late": late, "seconds": changes.pop("seconds", None)}
    engine = Scripted(loss=lambda step: 1 / step, skips=[3], steps_per_run=steps_per_run, **own)
    start(folder, engine, feed, **(usual | changes))
    last = engine.step
    newest = find_checkpoint(folder)
    assert newest is not None
    state = read_manifest(newest)["state"]
    assert engine.summary["step"] == last == state["step"]
    assert (state["consumed_samples"], state["sample_hash"]) == (2 * last, f"hash {last}")
    skipped = int(last >= 3)
    assert (state["skipped_steps"], state["skipped_in_a_row"]) == (skipped, 0)
    assert state["updated_samples"] == 2 * (last - skipped)
    if not changes.keys() & {"train__exit_interval", "train__exit_minutes"}:
        assert last == 10 and engine.summary["validation_loss"] == pytest.approx(0.1)
    return engine


def saved(folder: Path) -> list[int]:
    return [int(path.name[-2:]) for path in whole_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize(
    ("steps_per_run", "asked"), [(1, [1] * 10), (2, [2, 1, 1, 2, 2, 1, 1]), (100, [3, 1, 2, 2, 1, 1])]
)
def test_several_steps_at_once_never_cross_a_boundary(tmp_path: Path, steps_per_run: int, asked: list[int]) -> None:
    assert run_loop(tmp_path, steps_per_run).asked == asked
    rows = read_metrics(tmp_path / "metrics.jsonl")
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert list(losses.items()) == [(step, 1.0 / step) for step in range(1, 11)]
    assert [row["step"] for row in rows if "validation_loss" in row] == [4, 8, 10]
    assert saved(tmp_path) == [3, 6, 9, 10]
    assert rows[0]["grad_norm"] == 0.1 + 0.2, "floats read back exactly"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("steps_per_run", [1, 100])
def test_a_run_ends_at_a_step_with_a_checkpoint(tmp_path: Path, late: bool, steps_per_run: int) -> None:
    """Results that come late end it no later."""
    assert run_loop(tmp_path, steps_per_run, late, train__exit_interval=5).step == 5
    assert saved(tmp_path) == [3, 5]
    # the first step takes longer than this
    assert run_loop(tmp_path / "minutes", 1, train__exit_minutes=1e-9).step == 1
    assert saved(tmp_path / "minutes") == [1]


def test_rows_hold_the_arithmetic_of_speed(tmp_path: Path) -> None:
    """By the device's own time of a step: the host sees the last two results at once, long or soon after it."""
    run_loop(tmp_path, 1, late=True, seconds=0.25)
    # two blocks of width 32, 101 tokens, positions not counted; and attention 12 L h T
    parameters = 101 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    flops = 6 * parameters + 12 * 2 * 32 * 16
    for row in rows_of(tmp_path):
        assert (row["step_time"], row["samples_per_second"]) == (0.25, 8.0)
        assert row["tokens_per_second"] == 8 * 16
        assert row["mfu"] == pytest.approx(flops * 8 * 16 / 1e9)


def test_rows_hold_the_wait_for_data_and_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by a quarter of a second in every batch, and at no other time."""
    clock = [0.0]

    def slow() -> Iterator[Batch]:
        for batch in batches():
            clock[0] += 0.25
            yield batch

    monkeypatch.setattr("common.training.steps.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    run_loop(tmp_path, 2, feed=slow)
    rows = rows_of(tmp_path)
    assert [row["data_wait"] for row in rows] == [0.25] * 10 == [row["step_time"] for row in rows]
    assert {row["peak_memory"] for row in rows} == {12345}


@pytest.mark.parametrize("steps_per_run", [1, 2])
def test_results_that_come_late_make_the_same_run(tmp_path: Path, steps_per_run: int) -> None:
    """Rows, validations and checkpoints; nothing is under way when the loop looks at the model."""
    settings = {
        "profile": {"start": 5, "stop": 6}, "logging__outlier_deviations": 2.0,
        "logging__outlier_window": 8, "train__on_outlier": "skip",
    }  # fmt: skip
    now = run_loop(tmp_path / "now", steps_per_run, **settings)
    late = run_loop(tmp_path / "late", steps_per_run, late=True, **settings)
    require_equal(tmp_path / "late", tmp_path / "now", 0.0)
    assert now.asked == late.asked
    if steps_per_run == 1:
        assert now.limits == late.limits and now.limits[-1] != NO_LIMITS
    assert saved(tmp_path / "now") == saved(tmp_path / "late") and len(saved(tmp_path / "now")) == 4


def test_ranks_agree_as_late_as_results_come() -> None:
    """A stop that another rank asks for in step 3 shows after step 4, whose results are awaited."""
    asked: list[int] = []

    def start_max(value: int) -> Callable[[], int]:
        asked.append(value)
        answer = 15 if len(asked) == 3 else value
        return lambda: answer

    run: Any = SimpleNamespace(world=SimpleNamespace(start_max=start_max), batches=iter(()))
    state = TrainState(step=-1)
    steps = Steps(run, state)
    steps._asked = 0
    assert [steps.agree(0) for _ in range(4)] == [0, 0, 0, 15]
    state.step = 0
    assert steps.agree(2) == 2 and asked == [0, 0, 0, 0, 2]


def test_a_trace_has_steps_of_its_own(tmp_path: Path) -> None:
    """No sink goes across its beginning or its end."""
    assert run_loop(tmp_path, 100, profile={"start": 5, "stop": 6}).asked == [3, 1, 2, 2, 1, 1]
    assert run_loop(tmp_path / "other", 100, profile={"start": 8}, validation={}, checkpoint={}).asked == [7, 1, 2]


def test_an_engine_is_told_limits_only_to_skip_and_from_the_steps_before(tmp_path: Path) -> None:
    """Losses 1, 1/2, 1/3, ...: the limits of step 5 come from the first four."""
    window = {"outlier_deviations": 2.0, "outlier_window": 8}
    assert set(run_loop(tmp_path / "warn", 1, logging=window).limits) == {NO_LIMITS}
    limits = run_loop(tmp_path / "skip", 1, logging=window, train__on_outlier="skip").limits
    first = np.array([1, 1 / 2, 1 / 3, 1 / 4])
    assert limits[:4] == [NO_LIMITS] * 4
    assert limits[4].loss == pytest.approx(first.mean() + 2 * first.std(ddof=1), rel=1e-6)
    assert limits[9].loss == pytest.approx((last := 1 / np.arange(2, 10)).mean() + 2 * last.std(ddof=1), rel=1e-6)


# ---- outliers ----

CALM = [5.0, 5.1] * 4
FOUR = LoggingConfig(outlier_deviations=4.0, outlier_window=8)


def after(losses: list[float], config: LoggingConfig) -> tuple[TrainState, list[bool]]:
    """The state after steps of these losses, with gradient norms twice as large, and which were outliers."""
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
    """A lasting change of level is let through once the history knows it. Others are for the loss scale."""
    state, found = after([*CALM, 0.1, *CALM, 50.0], FOUR)
    assert found == [False] * 17 + [True]
    assert state.losses == [*CALM[1:], 50.0]
    assert after([*CALM, *[9.0, 9.1] * 4], FOUR)[1] == [False] * 8 + [True] + [False] * 7
    state, found = after([*CALM, math.nan, math.inf], FOUR)
    assert not any(found) and state.losses == CALM


def test_the_history_survives_a_manifest() -> None:
    state = TrainState(step=3, losses=[0.1 + 0.2, 1 / 3], grad_norms=[1e-30, 7.0])
    saved = json.loads(json.dumps(state.to_dict()))
    assert TrainState.from_dict(saved) == state
    old = {name: value for name, value in saved.items() if name not in ("losses", "grad_norms")}
    assert TrainState.from_dict(old) == TrainState(step=3)


# ---- traces ----


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

"""The loop with an engine of a few lines that takes several steps at once, as a data sink does."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.checkpoint.folders import whole_checkpoints
from common.checkpoint.state import TrainState
from common.checkpoint.writer import CheckpointWriter, Snapshot
from common.config.load import build_config
from common.dataset import Batch, Tokens
from common.resolve.derive import resolve_config
from common.training.engine import StepResult
from common.training.loop import perplexity, train
from common.training.metrics import MetricsWriter, read_metrics
from common.training.outliers import NO_LIMITS, Limits
from common.training.profile import ProfileWindow
from common.training.steps import Agreements, TrainingParts
from common.weights.names import flops_per_token
from tests.config_overrides import changed


class FakeEngine:
    def __init__(self, steps_per_run: int) -> None:
        self.steps_per_run = steps_per_run
        self.asked: list[int] = []
        self.limits: list[Limits] = []
        self.step = 0

    def run(
        self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS
    ) -> list[StepResult]:
        self.asked.append(steps)
        self.limits.append(limits)
        results = []
        for _ in range(steps):
            self.step += 1
            assert next(batches).tokens[0, 0] == self.step
            results.append(
                StepResult(
                    loss=1.0 / self.step,
                    grad_norm=0.1 + 0.2,
                    learning_rate=1e-4,
                    loss_scale=1.0,
                    skipped=self.step == 3,
                )
            )
        return results

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        return 6.0, sum(tokens.size for tokens in batches)

    def snapshot(self, state: TrainState) -> Snapshot:
        return Snapshot(
            files={"model.safetensors": {"w": np.ones(1, np.float32)}},
            manifest={"state": state.to_dict()},
        )


class LateEngine(FakeEngine):
    """Tells the result of a step when it is asked for the next one."""

    def __init__(self, steps_per_run: int) -> None:
        super().__init__(steps_per_run)
        self.under_way: list[StepResult] = []

    def run(
        self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS
    ) -> list[StepResult]:
        *known, last = [*self.under_way, *super().run(batches, steps, limits)]
        self.under_way = [last]
        return known

    def finish(self) -> list[StepResult]:
        known, self.under_way = self.under_way, []
        return known

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        assert not self.under_way
        return super().evaluate(batches)

    def snapshot(self, state: TrainState) -> Snapshot:
        assert not self.under_way and self.step == state.step
        return super().snapshot(state)


def batches() -> Iterator[Batch]:
    step = 0
    while True:
        step += 1
        yield Batch(
            tokens=np.full((2, 5), step, np.int32),
            samples=2,
            consumed_samples=2 * step,
            sample_hash=f"hash {step}",
        )


def run_loop(
    folder: Path, steps_per_run: int, kind: type[FakeEngine] = FakeEngine, **changes: Any
) -> FakeEngine:
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "model": {
            "num_layers": 1,
            "hidden_size": 8,
            "num_heads": 2,
            "seq_length": 4,
            "vocab_size": 50,
        },
        "train": {"max_steps": 10, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.1},
        "validation": {"interval": 4},
        "checkpoint": {"interval": 3},
    }
    config = resolve_config(build_config(changed(tree, changes)), samples_per_epoch=100)
    engine = kind(steps_per_run)
    state = TrainState()
    folder.mkdir(exist_ok=True)
    profile = ProfileWindow(config, state, lambda path: nullcontext())
    with MetricsWriter(folder, tensorboard=False) as metrics:
        run = TrainingParts(
            config=config,
            engine=engine,
            batches=batches(),
            validation={"all": lambda: [np.zeros((1, 3), np.int32)]},
            checkpoints=CheckpointWriter(folder / "checkpoints"),
            metrics=metrics,
            peak_flops=1e9,
            peak_memory=lambda: 12345,
            profile=profile,
        )
        summary = train(run, state)
    last = state.step
    assert (state.consumed_samples, state.sample_hash) == (2 * last, f"hash {last}")
    assert state.skipped_steps == (last >= 3) and summary["step"] == last
    if not changes.keys() & {"train__exit_interval", "train__exit_minutes"}:
        assert last == 10 and summary["validation_loss"] == 2.0
    return engine


@pytest.mark.parametrize(
    ("steps_per_run", "asked"),
    [(1, [1] * 10), (2, [2, 1, 1, 2, 2, 1, 1]), (100, [3, 1, 2, 2, 1, 1])],
)
def test_several_steps_at_once_never_cross_a_boundary(
    tmp_path: Path, steps_per_run: int, asked: list[int]
) -> None:
    assert run_loop(tmp_path, steps_per_run).asked == asked
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 11))
    assert [row["step"] for row in rows if "validation_loss" in row] == [4, 8, 10]
    assert [path.name[-2:] for path in whole_checkpoints(tmp_path / "checkpoints")] == [
        "03",
        "06",
        "09",
        "10",
    ]


@pytest.mark.parametrize("kind", [FakeEngine, LateEngine])
@pytest.mark.parametrize("steps_per_run", [1, 100])
def test_a_run_ends_at_a_step_with_a_checkpoint(
    tmp_path: Path, kind: type[FakeEngine], steps_per_run: int
) -> None:
    """Results that come late end it no later."""
    engine = run_loop(tmp_path, steps_per_run, kind, train__exit_interval=5)
    assert engine.step == 5
    assert [path.name[-2:] for path in whole_checkpoints(tmp_path / "checkpoints")] == ["03", "05"]


def test_a_run_ends_after_minutes(tmp_path: Path) -> None:
    """The first step takes longer than this."""
    assert run_loop(tmp_path, 1, train__exit_minutes=1e-9).step == 1
    assert [path.name[-2:] for path in whole_checkpoints(tmp_path / "checkpoints")] == ["01"]


def test_rows_hold_the_arithmetic_of_speed(tmp_path: Path) -> None:
    run_loop(tmp_path, 1)
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert row["samples_per_second"] == pytest.approx(2 / row["step_time"])
    assert row["tokens_per_second"] == pytest.approx(8 / row["step_time"])
    # one block of width 8, 50 tokens, positions not counted: 50 x 8 + 12 x 64 + 13 x 8 + 16
    # parameters, and attention 12 L h T
    assert row["mfu"] == pytest.approx(
        (6 * (400 + 768 + 104 + 16) + 12 * 8 * 4) * row["tokens_per_second"] / 1e9
    )


def test_rows_hold_the_wait_for_data_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves by a quarter of a second in every batch, and at no other time."""
    clock = [0.0]
    real = batches

    def slow() -> Iterator[Batch]:
        for batch in real():
            clock[0] += 0.25
            yield batch

    monkeypatch.setattr(
        "common.training.steps.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    monkeypatch.setitem(globals(), "batches", slow)
    run_loop(tmp_path, 2)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["data_wait"] for row in rows] == [0.25] * 10 == [row["step_time"] for row in rows]
    assert {row["peak_memory"] for row in rows} == {12345}


@pytest.mark.parametrize("steps_per_run", [1, 2])
def test_results_that_come_late_make_the_same_run(tmp_path: Path, steps_per_run: int) -> None:
    """Rows, validations and checkpoints; nothing is under way when the loop looks at the model."""
    settings = {
        "profile": {"start": 5, "stop": 6},
        "logging": {"outlier_deviations": 2.0, "outlier_window": 8},
    }
    runs = {
        kind: run_loop(tmp_path / kind.__name__, steps_per_run, kind, **settings)
        for kind in (FakeEngine, LateEngine)
    }
    timed = {"step_time", "data_wait", "validation_time", "mfu"}
    timed |= {"tokens_per_second", "samples_per_second"}
    one, other = (
        [
            {key: value for key, value in row.items() if key not in timed}
            for row in read_metrics(tmp_path / kind.__name__ / "metrics.jsonl")
        ]
        for kind in runs
    )
    assert one == other and len(one) == 13
    assert runs[FakeEngine].asked == runs[LateEngine].asked
    names = [
        [path.name for path in whole_checkpoints(tmp_path / kind.__name__ / "checkpoints")]
        for kind in runs
    ]
    assert names[0] == names[1] and len(names[0]) == 4


def test_limits_wait_for_the_step_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    window = {"outlier_deviations": 2.0, "outlier_window": 8}
    limits = [
        run_loop(tmp_path / kind.__name__, 1, kind, logging=window, train__on_outlier="skip").limits
        for kind in (FakeEngine, LateEngine)
    ]
    assert limits[0] == limits[1] and limits[0][-1] != NO_LIMITS


def test_ranks_agree_as_late_as_results_come() -> None:
    """A stop that another rank asks for in step 3 shows after step 4, whose results are awaited."""
    asked: list[int] = []

    def start_max(value: int) -> Callable[[], int]:
        asked.append(value)
        answer = 15 if len(asked) == 3 else value
        return lambda: answer

    agreements = Agreements(SimpleNamespace(start_max=start_max))  # type: ignore[arg-type]
    assert [agreements.largest(0, under_way) for under_way in (1, 1, 1, 1)] == [0, 0, 0, 15]
    assert agreements.largest(2, 0) == 2 and asked == [0, 0, 0, 0, 2]


def test_a_trace_has_steps_of_its_own(tmp_path: Path) -> None:
    """No sink goes across its beginning or its end."""
    assert run_loop(tmp_path, 100, profile={"start": 5, "stop": 6}).asked == [3, 1, 2, 2, 1, 1]
    assert run_loop(
        tmp_path / "other", 100, profile={"start": 8}, validation={}, checkpoint={}
    ).asked == [7, 1, 2]


def test_the_device_s_own_time_of_a_step_is_taken(tmp_path: Path) -> None:
    """The host sees the last two results at once, long after or soon after the device had them."""

    class Timed(LateEngine):
        def run(self, *arguments: Any) -> list[StepResult]:
            return [replace(each, seconds=0.25) for each in super().run(*arguments)]

        def finish(self) -> list[StepResult]:
            return [replace(each, seconds=0.25) for each in super().finish()]

    run_loop(tmp_path, 1, Timed)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["step_time"] for row in rows] == [0.25] * 10
    assert {row["tokens_per_second"] for row in rows} == {2 * 4 / 0.25}


def test_an_engine_is_told_limits_only_to_skip_and_from_the_steps_before(tmp_path: Path) -> None:
    """Losses 1, 1/2, 1/3, ...: the limits of step 5 come from the first four."""
    window = {"outlier_deviations": 2.0, "outlier_window": 8}
    assert set(run_loop(tmp_path / "warn", 1, logging=window).limits) == {NO_LIMITS}
    limits = run_loop(tmp_path / "skip", 1, logging=window, train__on_outlier="skip").limits
    first = np.array([1, 1 / 2, 1 / 3, 1 / 4])
    assert limits[:4] == [NO_LIMITS] * 4
    assert limits[4].loss == pytest.approx(first.mean() + 2 * first.std(ddof=1), rel=1e-6)
    assert limits[9].loss == pytest.approx(
        (last := 1 / np.arange(2, 10)).mean() + 2 * last.std(ddof=1), rel=1e-6
    )


def test_floats_read_back_exactly(tmp_path: Path) -> None:
    run_loop(tmp_path, 1)
    losses = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert losses == [1.0 / step for step in range(1, 11)]
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["grad_norm"] == 0.1 + 0.2


def test_taking_up_a_run_drops_rows_that_will_come_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 8))
        + '{"step": 8, "lo'
    )
    with MetricsWriter(tmp_path, step=5, tensorboard=False) as metrics:
        metrics.write({"step": 6, "loss": 2.0})
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 1.0),
        (5, 1.0),
        (6, 2.0),
    ]


def test_gpt2_flops_per_token_are_the_published_figure() -> None:
    """0.855 GFLOP a token for 124M at 1024 (6 (N - positions) + 12 L h T)."""
    from common.run_config import load_config

    root = Path(__file__).resolve().parents[3]
    model = resolve_config(load_config(root / "configs" / "gpt2" / "run_gpt2_124m.yaml")).model
    assert flops_per_token(model) == pytest.approx(0.855e9, rel=1e-3)


def test_perplexity() -> None:
    assert perplexity(math.log(42.0)) == pytest.approx(42.0)
    assert perplexity(1e6) == math.inf

"""Steps of a run: requests to the engine, rows of metrics, which may come a step later, and the trace of some steps."""

from __future__ import annotations

import gzip
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.snapshot import TrainState
from common.checkpoint.writer import CheckpointWriter
from common.dataset.sampler import Batch
from common.device import Device
from common.errors import ConfigError
from common.files import atomic_write
from common.log import LOG
from common.parallel.batch import epochs_done
from common.parallel.run import Run
from common.parallel.world import WorldBase
from common.processes.heartbeat import beat
from common.training.data import TrainingData
from common.training.engine import NO_LIMITS, Engine, StepResult, limits_of, record_outlier
from common.training.metrics import MetricsWriter
from common.weights.names import flops_per_token

Trace = Callable[[Path], AbstractContextManager[None]]
"""Function that traces the steps within its context and writes the trace to a file."""


class ProfileWindow:
    """Trace that begins before step profile.start and ends after profile.stop or with the run.

    The loop calls ``begin`` before and ``end`` after the steps that it requests from an engine, and
    stops at ``boundaries``.
    """

    def __init__(self, config: Run, state: TrainState, trace: Trace, *, rank: int = 0) -> None:
        """Create a window. Raises ConfigError if it lies beyond the run's end."""
        self._trace = trace
        self._open = ExitStack()
        self._rank = rank
        self._folder = Path(config.output_dir) / "profile"
        self._steps = range(0)
        start, last = config.profile.start, config.train.steps
        if start is None:
            return
        if start > last:
            raise ConfigError(
                f"profile.start={start} is beyond the last step, {last}: nothing would be traced; lower it"
            )
        stop = min(config.profile.stop or start, last)
        self._steps = range(max(start, state.step + 1), stop + 1)
        if not self._steps:
            LOG.warning(f"profile: steps {start} to {stop} are done already; nothing is traced")

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Return the steps after which a trace begins or ends."""
        return (self._steps[0] - 1, self._steps[-1]) if self._steps else ()

    def begin(self, step: int) -> None:
        """Start the trace if ``step``, the next one, is the first of the window."""
        if self._steps and step == self._steps[0]:
            path = self._folder / f"steps_{step}_{self._steps[-1]}_rank_{self._rank}.json.gz"
            LOG.info(
                f"profile: steps {step} to {self._steps[-1]} are traced, which slows them down; the"
                f" trace goes to {path}"
            )
            with _warning_only():
                self._open.enter_context(self._trace(path))

    def end(self, step: int) -> None:
        """End the trace if ``step``, just done, is the last of the window."""
        if self._steps and step == self._steps[-1]:
            with _warning_only():
                self._open.close()

    def __enter__(self) -> ProfileWindow:
        return self

    def __exit__(self, *_: object) -> None:
        with _warning_only():
            self._open.close()


@contextmanager
def _warning_only() -> Iterator[None]:
    """Turn any error of the trace into a warning.

    A full disk or a driver without a profiler must not end the training.
    """
    try:
        yield
    except Exception as error:
        LOG.warning(f"profile: no trace: {error}")


def compress(trace: Path, path: Path) -> None:
    """Move a trace to ``path`` as gzip, which Perfetto, TensorBoard and chrome://tracing open. Raises StorageError."""
    with (
        trace.open("rb") as plain,
        atomic_write(path) as file,
        gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed,
    ):
        shutil.copyfileobj(plain, packed)
    trace.unlink()


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """The fixed parts of a run."""

    config: Run
    engine: Engine
    batches: Iterator[Batch]
    data: TrainingData
    checkpoints: CheckpointWriter
    metrics: MetricsWriter
    device: Device
    resumed: bool = False
    """Whether the run resumes a checkpoint of its own folder, which need not be saved again."""
    profile: ProfileWindow
    world: WorldBase


class Steps:
    """The steps that the engine is asked for, and their rows of metrics."""

    def __init__(self, run: TrainingParts, state: TrainState) -> None:
        self._run, self._state = run, state
        self._batches = self._watched(run.batches, state.step)
        self._read: deque[tuple[Batch, float]] = deque()
        """Batches whose results are not known, and the seconds of waiting for each."""
        self._asked = state.step
        self._since = 0.0
        """Time of the last result, or of the first request after all were known."""
        self._told = False
        self._answers: deque[Callable[[], int]] = deque()

    @property
    def under_way(self) -> int:
        """Steps whose results are not known."""
        return self._asked - self._state.step

    def take(self, *, wait: bool) -> Iterator[dict[str, Any]]:
        """Ask for steps, at most up to the next one with an event, and yield the rows of those
        whose results are known. wait: until all are known, as at an event.
        """
        run, state, config = self._run, self._state, self._run.config
        distance = _steps_to_boundary(run, self._asked, config.train.steps)
        count = min(run.engine.steps_per_run, distance)
        if not self.under_way:
            run.profile.begin(self._asked + 1)
            self._since = time.perf_counter()
        results = run.engine.run(
            self._batches, count, limits_of(state, config.logging) if config.train.on_outlier == "skip" else NO_LIMITS
        )
        self._asked += count
        if self.under_way > len(results):
            if config.train.on_outlier == "skip" and not self._told:
                LOG.info(
                    "train.on_outlier=skip: every step waits for the results of the one before,"
                    " from which its limits follow"
                )
                self._told = True
            if wait or count == distance or config.train.on_outlier == "skip":
                results += run.engine.finish()
        yield from self._rows(results)

    def finish(self) -> Iterator[dict[str, Any]]:
        """Wait for the steps under way and yield their rows."""
        if self.under_way:
            yield from self._rows(self._run.engine.finish())

    def agree(self, value: int) -> int:
        """Start to find the largest value of all ranks, and wait for the answers of all calls but
        the last ``under_way``. Return the largest of these answers; 0 if there is none.
        """
        self._answers.append(self._run.world.start_max(value))
        found = 0
        while len(self._answers) > self.under_way:
            found = max(found, self._answers.popleft()())
        return found

    def _watched(self, batches: Iterator[Batch], step: int) -> Iterator[Batch]:
        while True:
            start = time.perf_counter()
            step += 1
            beat(step, "reading data")
            batch = next(batches)
            beat(step, "computing")
            waited = time.perf_counter() - start
            self._read.append((batch, waited))
            yield batch

    def _rows(self, results: list[StepResult]) -> Iterator[dict[str, Any]]:
        if not results:
            return
        run, state, config = self._run, self._state, self._run.config
        now = time.perf_counter()
        seen, self._since = (now - self._since) / len(results), now
        if len(results) == self.under_way:
            run.profile.end(self._asked)
        memory, flops = run.device.peak_memory(), flops_per_token(config.model)
        # of all devices together; 0 if unknown
        peak = run.device.peak_flops(config.precision.compute) * run.world.size
        read = [self._read.popleft() for _ in results]
        waited = sum(seconds for _, seconds in read) / len(results)
        for result, (batch, _) in zip(results, read, strict=True):
            state.step += 1
            state.consumed_samples = batch.consumed_samples
            state.sample_hash = batch.sample_hash
            state.updated_samples += 0 if result.skipped else batch.samples
            state.skipped_steps += result.skipped
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if result.skipped else 0
            outlier = record_outlier(state, config.logging, result.loss, result.grad_norm, skipped=result.skipped)
            seconds = result.seconds or seen
            speed = batch.samples / seconds
            yield {
                "step": state.step,
                "loss": result.loss,
                "learning_rate": result.learning_rate,
                "global_batch_size": batch.samples,
                "grad_norm": result.grad_norm,
                "tokens_per_second": speed * config.model.seq_length,
                "samples_per_second": speed,
                "step_time": seconds,
                "data_wait": waited,
                "mfu": flops * speed * config.model.seq_length / peak if peak else None,
                "peak_memory": memory,
                "loss_scale": result.loss_scale,
                "consumed_samples": state.consumed_samples,
                "sample_hash": batch.sample_hash,
                "skipped": result.skipped,
                "outlier": outlier,
                "skipped_steps": state.skipped_steps,
            }


def _steps_to_boundary(run: TrainingParts, step: int, last_step: int) -> int:
    """Return the number of steps up to the next one with an event."""
    config = run.config
    intervals = (config.validation.steps_between, config.checkpoint.interval, config.train.exit_interval)
    stops = [
        last_step,
        *((step // n + 1) * n for n in intervals if n),
        *_epoch_ends_after(run, step),
        *run.profile.boundaries,
    ]
    return min(stop for stop in stops if stop > step) - step


def _epoch_ends_after(run: TrainingParts, step: int) -> list[int]:
    """Return the step of the next end of an epoch, if weights are written there."""
    samples, batches = run.data.samples_per_epoch, run.config.batch_sizes
    if not (run.config.checkpoint.epoch_models and samples):
        return []
    return [batches.steps_within((epochs_done(step, batches, samples) + 1) * samples)]


def ends_epoch(run: TrainingParts, step: int) -> bool:
    return _epoch_ends_after(run, step - 1) == [step]

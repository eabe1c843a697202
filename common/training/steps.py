"""Steps of a run: requests to the engine, and rows of metrics, which may come one step later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.checkpoint.snapshot import TrainState
from common.checkpoint.writer import CheckpointWriter
from common.dataset import Batch
from common.device import Device
from common.log import LOG
from common.parallel.ramp import epochs_done
from common.parallel.run import Run
from common.parallel.world import WorldBase
from common.processes.heartbeat import beat
from common.training.data import TrainingData
from common.training.engine import Engine, StepResult
from common.training.metrics import MetricsWriter
from common.training.outliers import NO_LIMITS, limits_of, record_outlier
from common.training.profile import ProfileWindow
from common.weights.names import flops_per_token


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
        self._read: deque[_Read] = deque()
        """Batches whose results are not known."""
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
        """Yield batches on their way to the engine."""
        while True:
            start = time.perf_counter()
            step += 1
            beat(step, "reading data")
            batch = next(batches)
            beat(step, "computing")
            waited = time.perf_counter() - start
            read = _Read(batch.samples, batch.consumed_samples, batch.sample_hash, waited)
            self._read.append(read)
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
        waited = sum(batch.waited for batch in read) / len(results)
        for result, batch in zip(results, read, strict=True):
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


class _Read(NamedTuple):
    """Batch that was read: its size, the state of the run after it, and the seconds of waiting."""

    samples: int
    consumed_samples: int
    sample_hash: str
    waited: float


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

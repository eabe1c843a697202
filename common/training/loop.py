"""The training loop of both backends.

It drives an engine by ``run(batches, n) -> results of n steps`` and never calls backward itself, so that pipeline schedules,
DeepSpeed and MindSpore's data sink fit the same loop.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.config.schema import RunConfig
from common.dataset import Batch
from common.device import peak_resident_bytes
from common.errors import DivergedError, StopRequested
from common.log import LOG, progress_bar
from common.processes.heartbeat import beat
from common.training.checkpoint_writer import CheckpointWriter, Snapshot
from common.training.metrics import MetricsWriter, flops_per_token
from common.training.outliers import NO_LIMITS, Limits, limits_of, notice
from common.training.profile import ProfileWindow
from common.training.report import make_report
from common.training.saving import Saver
from common.training.state import TrainState
from common.training.stop import StopSignal

Tokens = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an engine reports of one optimizer step, over all ranks."""

    loss: float
    """Mean loss of the global batch, nats per token."""
    grad_norm: float
    """Global gradient norm before clipping, the loss scale taken out."""
    learning_rate: float
    loss_scale: float
    skipped: bool
    """True when the gradient was not finite, or beyond the limits, and the weights were left as they were."""


class Engine(Protocol):
    """A model with its optimizer, on some devices."""

    steps_per_run: int
    """Steps that ``run`` likes to be asked for at once: 1, or the sink size of a graph that loops on the device."""

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        """Take ``steps`` batches and make as many optimizer steps; one beyond the limits leaves weights and optimizer as they are."""
        ...

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """Sum of the losses over all predicted tokens of all ranks, in nats, and their number."""
        ...

    def snapshot(self, state: TrainState) -> Snapshot | None:
        """Everything needed to go on from ``state``; tensors may be lent until the next update. None on ranks that need not write."""
        ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """The fixed parts of one run."""

    config: RunConfig
    engine: Engine
    batches: Iterator[Batch]
    validation: Callable[[], Iterable[Tokens]] | None
    """Starts a pass over the validation windows."""
    checkpoints: CheckpointWriter
    metrics: MetricsWriter
    peak_flops: float
    """Of all devices together; 0 when unknown."""
    resumed: bool = False
    """True when the run goes on from a checkpoint of its own folder, which need not be saved again."""
    samples_per_epoch: int = 0
    """For log lines that count epochs."""
    peak_memory: Callable[[], int] = peak_resident_bytes
    """Most bytes held so far."""
    profile: ProfileWindow | None = None
    agree: Callable[[int], int] = int
    """The largest of the numbers of all ranks. Without it a rank could stop at another step than the others."""


def train(run: Run, state: TrainState) -> dict[str, Any]:
    """Train from ``state`` to the last step; save, validate and log on the way.

    Returns the last row of metrics with the validation figures, and when there was a step, ``seconds``, ``median_tokens_per_second``,
    ``samples_per_second_at_end`` (mean of the last 100 steps) and ``best_validation_perplexity``.
    Raises StopRequested after saving when a signal asked for a stop, and DivergedError after ``train.max_skipped_steps`` skipped steps
    in a row.
    """
    config = run.config
    last_step = config.train.max_steps
    assert last_step is not None
    summary: dict[str, Any] = {}
    report = make_report(config, run.samples_per_epoch)
    saver = Saver(run.checkpoints, run.engine.snapshot, vocabulary=config.model.vocab_size, saved_step=state.step if run.resumed else None)
    speeds: list[float] = []
    start = time.perf_counter()
    stopping, was_validated = 0, True
    with StopSignal() as stop, progress_bar(total=last_step, initial=state.step) as bar:
        if _lacks_validation(run, state.step):
            LOG.info(f"step {state.step}: its validation was not finished, and comes first")
            row, stopping = validate(run, state.step, stop)
            was_validated = not stopping
            if row:
                report.validation(row)
                summary |= row | {"best_validation_perplexity": row["validation_perplexity"]}
        if state.step >= last_step and not stopping:
            LOG.info(f"nothing to train: step {state.step} is done, and train.max_steps={last_step}; raise train.max_steps to go on")
        while state.step < last_step and not stopping:
            for row in _steps(run, state, _steps_to_boundary(run, state.step, last_step)):
                summary |= row
                speeds.append(row["samples_per_second"])
                run.metrics.write(row)
                bar.update()
                bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
                report.step(row)
                saver.step(row)
                _check_divergence(config, state)
            run.checkpoints.raise_failure()
            stopping = run.agree(stop.number or 0)
            if not stopping and state.step < last_step and (saver.is_postponed or _due(config.checkpoint.interval, state.step)):
                saver.save_unless_diverging(state)
            was_validated = run.validation is None or not _validation_due(config, state.step)
            if not stopping and not was_validated:
                row, stopping = validate(run, state.step, stop)
                was_validated = not stopping
                if row:
                    report.validation(row)
                    saver.validation(row)
                    best = min(summary.get("best_validation_perplexity", math.inf), row["validation_perplexity"])
                    summary |= row | {"best_validation_perplexity": best}
        if state.step >= last_step and not math.isfinite(saver.loss_of(state.step)):
            raise DivergedError(
                f"step {state.step}: the loss is {saver.loss_of(state.step)}, so this step is not saved; lower optimizer.learning_rate,"
                " and go on from an earlier checkpoint"
            )
        if saver.saved_step != state.step:
            (saver.save_last if state.step >= last_step else saver.save_unless_diverging)(state)
        run.checkpoints.wait()
        run.checkpoints.require_folder()
        if stopping and (state.step < last_step or not was_validated):
            saved = f"saved in {run.checkpoints.folder}" if saver.saved_step == state.step else f"not saved: {saver.why_not()}"
            raise StopRequested(stopping, f"stopped by signal {stopping} after step {state.step}; {saved}; checkpoint.resume=auto goes on")
    if speeds:
        summary |= {
            "seconds": time.perf_counter() - start,
            "median_tokens_per_second": statistics.median(speeds) * config.model.seq_length,
            "samples_per_second_at_end": statistics.fmean(speeds[-100:]),
        }
    return summary


def validate(run: Run, step: int, stop: StopSignal) -> tuple[dict[str, Any], int]:
    """One pass over the validation windows, if there are any; writes and returns its row.

    A signal, whose number is returned too, ends it without a row.
    """
    if run.validation is None:
        return {}, 0

    def go_on(_: Tokens) -> bool:
        beat(step, "validating")
        return not run.agree(stop.number or 0)

    start = time.perf_counter()
    total, tokens = run.engine.evaluate(itertools.takewhile(go_on, run.validation()))
    stopping = run.agree(stop.number or 0)
    if stopping:
        return {}, stopping
    loss = total / tokens
    row: dict[str, Any] = {
        "step": step,
        "validation_loss": loss,
        "validation_perplexity": perplexity(loss),
        "validation_tokens": tokens,
        "validation_time": time.perf_counter() - start,
    }
    run.metrics.write(row)
    return row, 0


def _lacks_validation(run: Run, step: int) -> bool:
    """Whether the run goes on from a checkpoint of its own at a step that was to be validated, and a stop or a kill prevented it."""
    if not run.resumed or run.validation is None or not step or not _validation_due(run.config, step):
        return False
    return bool(run.agree(int(run.metrics.lacks_validation(step))))


def _validation_due(config: RunConfig, step: int) -> bool:
    return _due(config.validation.interval, step) or step == config.train.max_steps


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _steps(run: Run, state: TrainState, count: int) -> Iterator[dict[str, Any]]:
    config = run.config
    samples = config.train.global_batch_size
    assert samples is not None
    batches = _WatchedBatches(run.batches, state.step)
    if run.profile is not None:
        run.profile.begin(state.step + 1)
    start = time.perf_counter()
    results = run.engine.run(batches, count, limits_of(state, config.logging) if config.train.skip_outliers else NO_LIMITS)
    seconds = (time.perf_counter() - start) / count
    if run.profile is not None:
        run.profile.end(state.step + count)
    speed = samples / seconds
    memory = run.peak_memory()
    for result, sample_hash in zip(results, batches.hashes, strict=True):
        state.step += 1
        state.consumed_samples += samples
        state.sample_hash = sample_hash
        state.skipped_steps += result.skipped
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if result.skipped else 0
        outlier = notice(state, config.logging, result.loss, result.grad_norm, skipped=result.skipped)
        yield {
            "step": state.step,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": speed * config.model.seq_length,
            "samples_per_second": speed,
            "step_time": seconds,
            "data_wait": batches.waited / count,
            "mfu": flops_per_token(config.model) * speed * config.model.seq_length / run.peak_flops if run.peak_flops else None,
            "peak_memory": memory,
            "loss_scale": result.loss_scale,
            "consumed_samples": state.consumed_samples,
            "sample_hash": sample_hash,
            "skipped": result.skipped,
            "outlier": outlier,
            "skipped_steps": state.skipped_steps,
        }


class _WatchedBatches:
    """The batches that pass, their hashes noted, and the seconds in which there was none."""

    def __init__(self, batches: Iterator[Batch], step: int) -> None:
        self._batches = batches
        self._step = step
        self.hashes: list[str] = []
        self.waited = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        step = self._step + len(self.hashes) + 1
        beat(step, "reading data")
        batch = next(self._batches)
        beat(step, "computing")
        self.waited += time.perf_counter() - start
        self.hashes.append(batch.sample_hash)
        return batch


def _steps_to_boundary(run: Run, step: int, last_step: int) -> int:
    """At most what the engine likes, and none beyond the next step at which something must happen."""
    intervals = (run.config.validation.interval, run.config.checkpoint.interval)
    stops = [last_step, *((step // n + 1) * n for n in intervals if n), *(run.profile.boundaries if run.profile else ())]
    return min(run.engine.steps_per_run, min(stop for stop in stops if stop > step) - step)


def _due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def _check_divergence(config: RunConfig, state: TrainState) -> None:
    if state.skipped_in_a_row >= config.train.max_skipped_steps:
        raise DivergedError(
            f"step {state.step}: {state.skipped_in_a_row} steps in a row had no finite gradient"
            f"{' or were outliers' if config.train.skip_outliers else ''}; lower optimizer.learning_rate,"
            " look at the data, or use precision=bf16 or float32 (train.max_skipped_steps is the limit). Earlier checkpoints are whole"
        )

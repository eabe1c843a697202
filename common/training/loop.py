"""The training loop of both backends.

It drives an engine by ``run(batches, n) -> results of n steps`` and never calls backward itself, so
that pipeline schedules, DeepSpeed and MindSpore's data sink fit the same loop.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from common.dataset import Batch, Tokens
from common.device import peak_resident_bytes
from common.errors import DivergedError, StopRequested
from common.log import LOG, progress_bar
from common.parallel.resolved_run import TrainingRun
from common.processes.heartbeat import beat
from common.training.checkpoint_writer import CheckpointWriter
from common.training.engine import Engine
from common.training.epochs import epochs_done
from common.training.metrics import MetricsWriter, flops_per_token
from common.training.outliers import NO_LIMITS, limits_of, record_outlier
from common.training.profile import ProfileWindow
from common.training.report import make_report
from common.training.saving import Saver
from common.training.state import TrainState
from common.training.stop import StopSignal


@dataclass(frozen=True, kw_only=True)
class Run:
    """The fixed parts of one run."""

    config: TrainingRun
    engine: Engine
    batches: Iterator[Batch]
    validation: Callable[[], Iterable[Tokens]] | None
    """Starts a pass over the validation windows."""
    checkpoints: CheckpointWriter
    metrics: MetricsWriter
    peak_flops: float
    """Peak of all devices together; 0 when unknown."""
    resumed: bool = False
    """Whether the run resumes a checkpoint of its own folder, which need not be saved again."""
    samples_per_epoch: int = 0
    """Used in log lines that count epochs."""
    peak_memory: Callable[[], int] = peak_resident_bytes
    """Most bytes held so far."""
    profile: ProfileWindow | None = None
    max_over_ranks: Callable[[int], int] = int
    """Largest of the numbers of all ranks, by which they stop at the same step."""


def train(run: Run, state: TrainState) -> dict[str, Any]:
    """Train from ``state`` to the last step; save, validate and log on the way.

    Returns the last row of metrics with the validation figures, and when there was a step,
    ``seconds``, ``median_tokens_per_second``, ``samples_per_second_at_end`` (mean of the last 100
    steps) and ``best_validation_perplexity``.
    Raises StopRequested after saving when a signal asked for a stop, and DivergedError after
    ``train.max_skipped_steps`` skipped steps in a row.
    """
    config = run.config
    last_step = config.train.max_steps
    summary: dict[str, Any] = {}
    report = make_report(config, run.samples_per_epoch)
    saver = Saver(
        run.checkpoints,
        run.engine.snapshot,
        vocabulary=config.model.vocab_size,
        saved_step=state.step if run.resumed else None,
    )
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
            LOG.info(
                f"nothing to train: step {state.step} is done, and train.max_steps={last_step};"
                " raise train.max_steps to go on"
            )
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
            stopping = run.max_over_ranks(stop.number or 0)
            if (
                not stopping
                and state.step < last_step
                and (
                    saver.is_postponed
                    or _due(config.checkpoint.interval, state.step)
                    or _ends_epoch(run, state.step)
                )
            ):
                saver.save_unless_diverging(state)
            was_validated = run.validation is None or not _validation_due(config, state.step)
            if not stopping and not was_validated:
                row, stopping = validate(run, state.step, stop)
                was_validated = not stopping
                if row:
                    report.validation(row)
                    saver.validation(row)
                    best = min(
                        summary.get("best_validation_perplexity", math.inf),
                        row["validation_perplexity"],
                    )
                    summary |= row | {"best_validation_perplexity": best}
        if state.step >= last_step and not math.isfinite(saver.loss_of(state.step)):
            raise DivergedError(
                f"step {state.step}: the loss is {saver.loss_of(state.step)}, so this step is not"
                " saved; lower optimizer.learning_rate, and go on from an earlier checkpoint"
            )
        if saver.saved_step != state.step:
            (saver.save_last if state.step >= last_step else saver.save_unless_diverging)(state)
        run.checkpoints.wait()
        run.checkpoints.require_folder()
        if stopping and (state.step < last_step or not was_validated):
            saved = (
                f"saved in {run.checkpoints.folder}"
                if saver.saved_step == state.step
                else f"not saved: {saver.why_not()}"
            )
            raise StopRequested(
                stopping,
                f"stopped by signal {stopping} after step {state.step}; {saved};"
                " checkpoint.resume=auto goes on",
            )
    if speeds:
        summary |= {
            "seconds": time.perf_counter() - start,
            "median_tokens_per_second": statistics.median(speeds) * config.model.seq_length,
            "samples_per_second_at_end": statistics.fmean(speeds[-100:]),
        }
    return summary


def validate(run: Run, step: int, stop: StopSignal) -> tuple[dict[str, Any], int]:
    """Go through the validation windows, if there are any; write the row and return it.

    A signal ends the pass without a row. Its number is returned too.
    """
    if run.validation is None:
        return {}, 0

    def go_on(_: Tokens) -> bool:
        beat(step, "validating")
        return not run.max_over_ranks(stop.number or 0)

    start = time.perf_counter()
    total, tokens = run.engine.evaluate(itertools.takewhile(go_on, run.validation()))
    stopping = run.max_over_ranks(stop.number or 0)
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
    """Whether a stop or a kill prevented the validation of the step from which the run resumes."""
    if (
        not run.resumed
        or run.validation is None
        or not step
        or not _validation_due(run.config, step)
    ):
        return False
    return bool(run.max_over_ranks(int(run.metrics.lacks_validation(step))))


def _validation_due(config: TrainingRun, step: int) -> bool:
    return _due(config.validation.interval, step) or step == config.train.max_steps


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _steps(run: Run, state: TrainState, count: int) -> Iterator[dict[str, Any]]:
    config = run.config
    samples = config.train.global_batch_size
    batches = _WatchedBatches(run.batches, state.step)
    if run.profile is not None:
        run.profile.begin(state.step + 1)
    start = time.perf_counter()
    results = run.engine.run(
        batches,
        count,
        limits_of(state, config.logging) if config.train.skip_outliers else NO_LIMITS,
    )
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
        outlier = record_outlier(
            state, config.logging, result.loss, result.grad_norm, skipped=result.skipped
        )
        yield {
            "step": state.step,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": speed * config.model.seq_length,
            "samples_per_second": speed,
            "step_time": seconds,
            "data_wait": batches.waited / count,
            "mfu": flops_per_token(config.model) * speed * config.model.seq_length / run.peak_flops
            if run.peak_flops
            else None,
            "peak_memory": memory,
            "loss_scale": result.loss_scale,
            "consumed_samples": state.consumed_samples,
            "sample_hash": sample_hash,
            "skipped": result.skipped,
            "outlier": outlier,
            "skipped_steps": state.skipped_steps,
        }


class _WatchedBatches:
    """Batches on their way to the engine: their hashes, and the seconds spent waiting for them."""

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
    """Return how many steps to ask for: none beyond the next one at which something happens."""
    intervals = (run.config.validation.interval, run.config.checkpoint.interval)
    stops = [
        last_step,
        *((step // n + 1) * n for n in intervals if n),
        *_epoch_ends_after(run, step),
        *(run.profile.boundaries if run.profile else ()),
    ]
    return min(run.engine.steps_per_run, min(stop for stop in stops if stop > step) - step)


def _epoch_ends_after(run: Run, step: int) -> list[int]:
    """Return the step of the next end of an epoch, where weights are written there."""
    samples, batch = run.samples_per_epoch, run.config.train.global_batch_size
    if not (run.config.checkpoint.epoch_models and samples):
        return []
    return [(epochs_done(step, batch, samples) + 1) * samples // batch]


def _ends_epoch(run: Run, step: int) -> bool:
    return _epoch_ends_after(run, step - 1) == [step]


def _due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def _check_divergence(config: TrainingRun, state: TrainState) -> None:
    if state.skipped_in_a_row >= config.train.max_skipped_steps:
        raise DivergedError(
            f"step {state.step}: {state.skipped_in_a_row} steps in a row had no finite"
            f" gradient{' or were outliers' if config.train.skip_outliers else ''}; lower"
            " optimizer.learning_rate, look at the data, or use precision=bf16 or float32"
            " (train.max_skipped_steps is the limit). Earlier checkpoints are whole"
        )

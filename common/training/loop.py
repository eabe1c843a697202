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
from common.errors import DivergedError, StopRequested
from common.training.checkpoint import CheckpointWriter, Snapshot
from common.training.log import LOG, progress_bar, step_line
from common.training.metrics import MetricsWriter, flops_per_token
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
    """True when the gradient was not finite and the weights were left as they were."""


class Engine(Protocol):
    """A model with its optimizer, on some devices."""

    steps_per_run: int
    """Steps that ``run`` likes to be asked for at once: 1, or the sink size of a graph that loops on the device."""

    def run(self, batches: Iterator[Batch], steps: int) -> list[StepResult]:
        """Take ``steps`` batches and make as many optimizer steps."""
        ...

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """Sum of the losses over all predicted tokens, in nats, and their number."""
        ...

    def snapshot(self, state: TrainState) -> Snapshot:
        """A copy of everything needed to go on from ``state``."""
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
    taken_up: bool = False
    """True when the run goes on from a checkpoint of its own folder, which need not be saved again."""


def train(run: Run, state: TrainState) -> dict[str, Any]:
    """Train from ``state`` to the last step; save, validate and log on the way.

    Returns the last row of metrics with the validation figures, ``seconds`` and ``median_tokens_per_second``.
    Raises StopRequested after saving when a signal asked for a stop, and DivergedError after ``train.max_skipped_steps`` steps
    in a row without a finite gradient.
    """
    config = run.config
    last_step = config.train.max_steps
    assert last_step is not None
    summary: dict[str, Any] = {}
    saved_step = state.step if run.taken_up else None
    speeds: list[float] = []
    start = time.perf_counter()
    with StopSignal() as stop, progress_bar(total=last_step, initial=state.step) as bar:
        while state.step < last_step:
            for row in _steps(run, state, _steps_to_boundary(config, state.step, last_step, run.engine.steps_per_run)):
                summary |= row
                speeds.append(row["tokens_per_second"])
                run.metrics.write(row)
                bar.update()
                bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
                if row["step"] % config.logging.interval == 0 or row["step"] == last_step or row["skipped"]:
                    LOG.info(step_line(row, last_step))
                _check_divergence(config, state)
            run.checkpoints.raise_failure()
            if stop.number is None and _due(config.checkpoint.interval, state.step) and state.step < last_step:
                run.checkpoints.save(run.engine.snapshot(state))
                saved_step = state.step
            if stop.number is None and (_due(config.validation.interval, state.step) or state.step == last_step):
                summary |= validate(run, state.step, stop)
            if stop.number is not None:
                break
        if stop.number is None and not math.isfinite(summary.get("loss", 0.0)):
            raise DivergedError(
                f"step {state.step}: the loss is {summary['loss']}, so this step is not saved; lower optimizer.learning_rate,"
                " and go on from an earlier checkpoint"
            )
        if saved_step != state.step:
            run.checkpoints.save(run.engine.snapshot(state))
        run.checkpoints.wait()
        if stop.number is not None and state.step < last_step:
            where = f"stopped by signal {stop.number} after step {state.step}; saved in {run.checkpoints.folder}"
            raise StopRequested(stop.number, f"{where}; checkpoint.resume=auto goes on")
    if speeds:
        summary |= {"seconds": time.perf_counter() - start, "median_tokens_per_second": statistics.median(speeds)}
    return summary


def validate(run: Run, step: int, stop: StopSignal) -> dict[str, Any]:
    """One pass over the validation windows, if there are any; writes and returns its row, unless a stop is asked for meanwhile."""
    if run.validation is None:
        return {}
    total, tokens = run.engine.evaluate(itertools.takewhile(lambda _: stop.number is None, run.validation()))
    if stop.number is not None:
        return {}
    loss = total / tokens
    row: dict[str, Any] = {"step": step, "validation_loss": loss, "validation_perplexity": perplexity(loss), "validation_tokens": tokens}
    run.metrics.write(row)
    LOG.info(f"validation at step {step}: loss {loss:.4f}, perplexity {row['validation_perplexity']:.2f} over {tokens} tokens")
    return row


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _steps(run: Run, state: TrainState, count: int) -> Iterator[dict[str, Any]]:
    config = run.config
    samples = config.train.global_batch_size
    assert samples is not None
    tokens = samples * config.model.seq_length
    hashes: list[str] = []
    start = time.perf_counter()
    results = run.engine.run(_noting_hashes(run.batches, hashes), count)
    seconds = (time.perf_counter() - start) / count
    for result, sample_hash in zip(results, hashes, strict=True):
        state.step += 1
        state.consumed_samples += samples
        state.sample_hash = sample_hash
        state.skipped_steps += result.skipped
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if result.skipped else 0
        speed = tokens / seconds
        yield {
            "step": state.step,
            "loss": result.loss,
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": speed,
            "samples_per_second": samples / seconds,
            "step_time": seconds,
            "mfu": flops_per_token(config.model) * speed / run.peak_flops if run.peak_flops else 0.0,
            "loss_scale": result.loss_scale,
            "consumed_samples": state.consumed_samples,
            "sample_hash": sample_hash,
            "skipped": result.skipped,
            "skipped_steps": state.skipped_steps,
        }


def _noting_hashes(batches: Iterator[Batch], hashes: list[str]) -> Iterator[Batch]:
    for batch in batches:
        hashes.append(batch.sample_hash)
        yield batch


def _steps_to_boundary(config: RunConfig, step: int, last_step: int, wished: int) -> int:
    """At most ``wished`` steps, and none beyond the next step at which something must happen."""
    stops = [last_step, *((step // n + 1) * n for n in (config.validation.interval, config.checkpoint.interval) if n)]
    return min(wished, min(stops) - step)


def _due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def _check_divergence(config: RunConfig, state: TrainState) -> None:
    if state.skipped_in_a_row >= config.train.max_skipped_steps:
        raise DivergedError(
            f"step {state.step}: {state.skipped_in_a_row} steps in a row had no finite gradient; lower optimizer.learning_rate,"
            " look at the data, or use precision=bf16 or float32 (train.max_skipped_steps is the limit). Earlier checkpoints are whole"
        )

"""The training loop of both backends.

It drives an engine by ``run(batches, n) -> results`` and never calls backward itself, so that pipeline schedules,
DeepSpeed and MindSpore's data sink fit the same loop. Where a device computes on its own, the results of a step come
while it computes the next one. Nothing is under way when the loop saves, validates, traces or ends.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

from common.checkpoint.snapshot import TrainState
from common.dataset.sampler import Tokens
from common.errors import DivergedError, StopRequested
from common.interrupts import StopSignal
from common.log import LOG, progress_bar
from common.parallel.run import Run
from common.processes.heartbeat import beat
from common.training.report import Report
from common.training.saving import Saver
from common.training.steps import Steps, TrainingParts, ends_epoch

_EXIT = 1
"""Answer of a rank that train.exit_interval or train.exit_minutes ends; numbers of signals that stop a run are larger.
"""


def train(run: TrainingParts, state: TrainState) -> dict[str, Any]:
    """Train from ``state`` to the last step; save, validate and log on the way.

    Returns the last row of metrics with the validation figures, and when there was a step, ``seconds``,
    ``median_tokens_per_second``, ``samples_per_second_at_end`` (mean of the last 100 steps) and
    ``best_validation_perplexity``. It returns earlier, after saving, where train.exit_interval or train.exit_minutes
    says so. Raises StopRequested after saving when a signal asked for a stop, and DivergedError after
    ``train.max_skipped_steps`` skipped steps in a row.
    """
    config = run.config
    last_step = config.train.steps
    summary: dict[str, Any] = {}
    report = Report(config, run.data.samples_per_epoch)
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

        def validated() -> int:
            """Validate, and return the number of a signal that cut it short, else 0."""
            row, stopped_by = validate(run, state.step, stop)
            if row:
                report.validation(row)
                saver.validation(row)
                best = min(summary.get("best_validation_perplexity", math.inf), row["validation_perplexity"])
                summary.update(row, best_validation_perplexity=best)
            return stopped_by

        if _lacks_validation(run, state.step):
            LOG.info(f"step {state.step}: its validation was not finished, and is done first")
            stopping = validated()
            was_validated = not stopping
        if state.step >= last_step and not stopping:
            LOG.info(
                f"nothing to train: step {state.step} is done, and train.max_steps={last_step};"
                " raise train.max_steps to continue"
            )
        steps = Steps(run, state)

        def record(rows: Iterable[dict[str, Any]]) -> None:
            for row in rows:
                summary.update(row)
                speeds.append(row["samples_per_second"])
                run.metrics.write(row)
                bar.update()
                bar.set_postfix(loss=f"{row['loss']:.3f}", refresh=False)
                report.step(row)
                saver.step(row)
                _check_divergence(config, state)

        while state.step < last_step and not stopping:
            record(steps.take(wait=saver.is_postponed))
            run.checkpoints.raise_failure()
            known = 0 if steps.under_way else state.step
            wish = stop.number or _exit_wish(config, known, time.perf_counter() - start)
            stopping = steps.agree(wish)
            record(steps.finish() if stopping else ())
            if steps.under_way:
                continue
            due = saver.is_postponed or _due(config.checkpoint.interval, state.step) or ends_epoch(run, state.step)
            if due and not stopping and state.step < last_step:
                saver.save_unless_diverging(state)
            was_validated = not run.data.validation or not _validation_due(config, state.step)
            if not stopping and not was_validated:
                stopping = validated()
                was_validated = not stopping
        if saver.saved_step != state.step:
            if state.step >= last_step and not math.isfinite(saver.loss_of(state.step)):
                raise DivergedError(
                    f"step {state.step}: the loss is {saver.loss_of(state.step)}, so this step is not"
                    " saved; lower optimizer.learning_rate, and resume from an earlier checkpoint"
                )
            (saver.save_last if state.step >= last_step else saver.save_unless_diverging)(state)
        run.checkpoints.wait()
        run.checkpoints.require_folder()
        if stopping and (state.step < last_step or not was_validated):
            saved = (
                f"saved in {run.checkpoints.folder}"
                if saver.saved_step == state.step
                else f"not saved: {saver.reason_not_saved()}"
            )
            _end_early(config, stopping, f" after step {state.step}; {saved}")
    if speeds:
        summary |= {
            "seconds": time.perf_counter() - start,
            "median_tokens_per_second": statistics.median(speeds) * config.model.seq_length,
            "samples_per_second_at_end": statistics.fmean(speeds[-100:]),
        }
    return summary


def _exit_wish(config: Run, step: int, seconds: float) -> int:
    """Return _EXIT where the configuration ends this process, else 0. step: the last one, 0 while it is not known."""
    limit = config.train.exit_minutes
    timed_out = limit is not None and seconds >= 60 * limit
    at_step = step > 0 and _due(config.train.exit_interval or 0, step)
    return _EXIT if timed_out or at_step else 0


def _end_early(config: Run, stopping: int, where: str) -> None:
    """Log the end that the configuration asked for, or raise StopRequested for a signal."""
    again = "the same command resumes"
    if config.checkpoint.resume not in ("auto", "latest"):
        again = f"{again} with checkpoint.resume=auto"
    if stopping != _EXIT:
        raise StopRequested(stopping, f"{where}; {again}")
    LOG.info(f"stopped by train.exit_interval or train.exit_minutes{where}; {again}")


def validate(run: TrainingParts, step: int, stop: StopSignal) -> tuple[dict[str, Any], int]:
    """Evaluate the validation windows; write the row and return it.

    A signal ends the pass without a row. Its number is returned too.
    """

    def go_on(_: Tokens) -> bool:
        beat(step, "validating")
        return not run.world.all_reduce_max(stop.number or 0)

    start = time.perf_counter()
    parts = {
        name: run.engine.evaluate(itertools.takewhile(go_on, windows()))
        for name, windows in run.data.validation.items()
    }
    stopping = run.world.all_reduce_max(stop.number or 0)
    if stopping:
        return {}, stopping
    seconds = time.perf_counter() - start
    figures = validation_figures(parts, run.data.validation_bytes())
    row = {"step": step, **figures, "validation_time": seconds}
    run.metrics.write(row)
    return row, 0


def _lacks_validation(run: TrainingParts, step: int) -> bool:
    """Whether a stop or a kill prevented the validation of the step from which the run resumes."""
    if not run.resumed or not run.data.validation or not step:
        return False
    is_due = _validation_due(run.config, step)
    return is_due and bool(run.world.all_reduce_max(int(run.metrics.lacks_validation(step))))


def _validation_due(config: Run, step: int) -> bool:
    return _due(config.validation.steps_between, step) or step == config.train.steps


def validation_figures(sums: Mapping[str, tuple[float, int]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the mean loss over all tokens, its perplexity, the number of tokens, and the bits a
    byte where the bytes are known.

    sums: loss in nats, and tokens, by data set. sizes: bytes of their text, if known. The figures
    of each of several are ``KEY/NAME``.
    """
    parts = {"": list(sums)}
    if len(sums) > 1:
        parts |= {f"/{name}": [name] for name in sums}
    row: dict[str, Any] = {}
    for ending, names in parts.items():
        total = sum(sums[name][0] for name in names)
        tokens = sum(sums[name][1] for name in names)
        size = sum(sizes.get(name, 0) for name in names)
        loss = total / tokens if tokens else math.nan
        row[f"validation_loss{ending}"] = loss
        row[f"validation_perplexity{ending}"] = perplexity(loss)
        if size:
            row[f"validation_bits_per_byte{ending}"] = total / math.log(2) / size
        row[f"validation_tokens{ending}"] = tokens
    return row


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def _check_divergence(config: Run, state: TrainState) -> None:
    if state.skipped_in_a_row >= config.train.max_skipped_steps:
        raise DivergedError(
            f"step {state.step}: {state.skipped_in_a_row} steps in a row had no finite"
            f" gradient{' or were outliers' if config.train.on_outlier == 'skip' else ''}; lower"
            " optimizer.learning_rate, look at the data, or use precision=bf16 or float32"
            " (train.max_skipped_steps is the limit). Earlier checkpoints are whole"
        )

"""Log lines of steps and validations, in the style of logging.style.

``metrics.jsonl`` is the same in every style. Scripts that read the logs of Megatron-DeepSpeed, PaddleFleetX,
MindFormers, OneFlow or GPT2-Chinese can read these lines. The lines follow the format strings of those systems
character by character. They have a time in front only where those systems write one.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from common.accelerators import GIB
from common.log import LOG, listed
from common.parallel.batch import place_in_epochs
from common.parallel.run import Run
from common.weights.names import flops_per_token

Row = dict[str, Any]

WAIT_WORTH_A_WORD = 0.05
"""Share of a step spent waiting for data above which the line reports it."""

SLOW_FIRST_STEP = 10.0
"""Seconds of a first step from which on the log names its time."""

RECENT_STEPS = 100
"""Number of steps whose median time predicts the time left."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """Lines of a system as format strings, filled by ``Report.step_values`` and the row of a validation."""

    prefix: str = "%(message)s"
    time: str | None = None
    step: tuple[str, ...]
    validation: str = (
        "validation at step {step}: loss {validation_loss:.4f}, perplexity"
        " {validation_perplexity:.2f}{bits} over {validation_tokens} tokens"
    )
    dashes: bool = False
    """Whether a validation stands between dashes."""
    title: tuple[str, ...] = ()
    """Lines above the first step, and above the first one after a validation."""
    more_lines: bool = False
    """Whether the first step and skipped ones get a line at any interval."""
    counts_samples: bool = False
    """Whether the last batch of an epoch ends in the next one. Elsewhere it does while the batch
    grows; then all epochs have whole batches and one length, as those systems count them.
    """


STYLES = {
    "gpt2": Style(prefix="%(asctime)s %(message)s", time="%H:%M:%S", step=("{own}",), more_lines=True),
    # training_log, evaluate_and_print_results, and "steps:" of DeepSpeed's pipeline engine. The
    # ModelZoo scripts read word 10 of lines with samples/sec and word 15 of lines with validation
    # loss, so nothing may be written in front of them.
    "megatron": Style(
        step=(
            "steps: {step} loss: {loss:0.4f} iter time (s): {seconds:0.3f} samples/sec: {rate:0.3f}",
            " iteration {step:8d}/{last_step:8d} | consumed samples: {consumed_samples:12d} |"
            " consumed tokens: {consumed_tokens:12d} | elapsed time per iteration (ms): {ms:.1f} |"
            " learning rate: {learning_rate:.3E} | global batch size: {global_batch_size:5d} |"
            " {lm_loss}loss scale: {loss_scale:.1f} | grad norm: {grad_norm:.3f} |"
            " number of skipped iterations: {skips:3d} | number of nan iterations: {nans:3d} |"
            " samples per second: {rate:.3f} | TFLOPs: {tera_flops:.2f} |",
        ),
        validation=" validation loss at iteration {step} | lm loss value: {validation_loss:.6E} |"
        " lm loss PPL: {capped_perplexity:.6E} | ",
        dashes=True,
    ),
    # its line of 2022-07 and its [eval] line; later versions omit some parts
    "fleetx": Style(
        prefix="[%(asctime)s] [%(levelname)8s] - %(message)s",
        step=(
            "global step {step}, epoch: {epoch}, batch: {within}, loss: {loss:.9f}, avg_reader_cost: {wait:.5f} sec,"
            " avg_batch_cost: {seconds:.5f} sec, speed: {speed:.2f} step/s, ips_total: {tokens:.0f} tokens/s, ips:"
            " {tokens_of_copy:.0f} tokens/s, learning rate: {learning_rate:.5e}",
        ),
        validation="[eval] epoch: {epoch}, batch: {last_batch}, loss: {validation_loss:.9f},"
        " avg_eval_cost: {cost:.5f} sec, speed: {speed:.2f} step/s",
    ),
    # the loss monitor of r0.3, with the evaluation line of MindSpore's
    "mindformers": Style(
        prefix="%(asctime)s - mindformers - %(levelname)s - %(message)s",
        step=(
            "Epoch:[{epoch_from_1:3d}/{epochs:3d}], step:[{step_from_1:5d}/{epoch_steps:5d}],"
            " loss:[{loss:5.3f}/{epoch_loss:5.3f}], time:{last_ms:5.3f} ms, lr:{float32_rate!s},"
            " overflow cond: {overflow}, loss_scale: {loss_scale}",
        ),
        validation="Eval result: epoch {epoch_from_1}, metrics: {metrics}",
    ),
    # OneFlow-Benchmark's Metric: throughput in samples a second, latency in seconds a step
    "oneflow": Style(
        step=(
            "| {step:<8} | {micro_batches:<15} | {consumed_samples:<15} | {rate:<10.5f} |"
            " {seconds:<10.5f} | {mean_loss:<10.5f} |",
        ),
        title=(
            "| step     | micro_batches   | samples         | throughput | latency    | loss       |",
            "| -------- | --------------- | --------------- | ---------- | ---------- | ---------- |",
        ),
    ),
    "oneflow-normal": Style(
        step=(
            "step={step},micro_batches={micro_batches},samples={consumed_samples},"
            "throughput={rate:.5f},latency={seconds:.5f},loss={mean_loss:.5f},",
        )
    ),
    # train.py and eval.py. Windows of the whole corpus are shuffled together here, so an epoch has
    # one piece. train.py divides its first sum of losses by one step too many.
    "gpt2-chinese": Style(
        step=(
            "now time: {now.hour}:{now.minute}. Step {step_from_1} of piece 0 of epoch"
            " {epoch_from_1}, loss {mean_loss}",
        ),
        validation="now time: {now.hour}:{now.minute}. Step {step_from_1} of piece 0, ppl {validation_perplexity}",
        counts_samples=True,
    ),
}


class Report:
    """Log of a run in one style."""

    def __init__(self, config: Run, samples_per_epoch: int = 0) -> None:
        """Create a report. samples_per_epoch: of the data, unless train.num_samples says how long
        an epoch is; 0 if unknown, and all steps then belong to one epoch.
        """
        samples_per_epoch = config.train.num_samples or samples_per_epoch
        steps, batch = config.train.steps, config.train.global_batch_size
        self.config, self.style = config, STYLES[config.logging.style]
        self.last_step = steps
        self.batches = config.batch_sizes
        self.steps_per_epoch = max(1, samples_per_epoch // batch) if samples_per_epoch else steps
        """Steps of an epoch of full batches."""
        self._epoch_samples = samples_per_epoch if self.batches.grows else 0
        """Samples of an epoch if they are counted, else 0."""
        if self.style.counts_samples:
            self._epoch_samples = samples_per_epoch or self.batches.samples_after(steps)
        self._rows: list[Row] = []
        self._steps_seen = 0
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._epoch = (-1, 0.0, 0)
        """Number of the epoch, and the sum and count of its losses that this process saw."""
        self._titled = False
        """Whether the last line of the log belongs to a table."""

    def step(self, row: Row) -> None:
        """Log a step if a line is due. Lines with averages cover the steps since the previous line."""
        self._steps_seen += 1
        if self._steps_seen == 1 and row["step_time"] >= SLOW_FIRST_STEP:
            LOG.info(f"first step: {row['step_time']:.0f} s, with compilation and warm-up")
        # the first call of the engine compiles and fills caches
        if self._steps_seen > self.config.train.sink_size:
            self._times.append(row["step_time"] / row["global_batch_size"])
        epoch = self.place(row["step"])[0]
        _, total, count = self._epoch if self._epoch[0] == epoch else (epoch, 0.0, 0)
        self._epoch = (epoch, total + row["loss"], count + 1)
        if self._rows:  # keep only the averaged values of older rows
            self._rows[-1] = {
                name: self._rows[-1][name]
                for name in ("step_time", "data_wait", "loss", "skipped", "global_batch_size")
            }
        self._rows.append(row)
        if (
            row["step"] % self.config.logging.interval == 0
            or row["step"] == self.last_step
            or (self.style.more_lines and (self._steps_seen == 1 or row["skipped"]))
        ):
            values = self.step_values(self._rows)
            for line in (*(() if self._titled else self.style.title), *self.style.step):
                LOG.info(line.format(**values))
            self._rows, self._titled = [], True
        hashes = self.config.logging.hash_interval
        # the summary of a run has that of its last step
        if hashes and row["step"] % hashes == 0 and row["step"] != self.last_step:
            LOG.info(f"data: {row['consumed_samples']} samples up to step {row['step']}, hash {row['sample_hash']}")

    def validation(self, row: Row) -> None:
        self._titled = False
        window = self.config.validation.micro_batch_size * self.config.model.seq_length
        batches = max(1, -(-row["validation_tokens"] // window))
        line = self.style.validation.format(
            **row,
            **self._epoch_values(row["step"]),
            bits=bits_a_byte(row),
            capped_perplexity=math.exp(min(20, row["validation_loss"])),
            metrics={"loss": row["validation_loss"], "PPL": row["validation_perplexity"]},
            last_batch=batches - 1,
            cost=row["validation_time"] / batches,
            speed=batches / row["validation_time"],
        )
        dashes = ["-" * (len(line) + 1)] * self.style.dashes
        for each in (*dashes, line, *dashes, *part_lines(row)):
            LOG.info(each)

    def step_values(self, rows: list[Row]) -> dict[str, Any]:
        """Return the values of a line for ``rows``, the steps since the last line (at least one):
        those of the last row and means.
        """
        row, config = rows[-1], self.config
        seconds, batch = _mean(rows, "step_time"), _mean(rows, "global_batch_size")
        advanced = [each for each in rows if not each["skipped"]]
        tokens = batch * config.model.seq_length / seconds
        flops = flops_per_token(config.model) * tokens / config.topology.world_size
        return {
            **row,
            **self._epoch_values(row["step"]),
            "own": self._own_line(row),
            "last_step": self.last_step,
            "epochs": self.place(self.last_step)[0] + 1,
            "epoch_loss": self._epoch[1] / max(1, self._epoch[2]),
            "micro_batches": self.batches.samples_after(row["step"])
            // (config.train.micro_batch_size * config.parallel.data_parallel),
            "consumed_tokens": row["consumed_samples"] * config.model.seq_length,
            "seconds": seconds,
            "speed": 1 / seconds,
            "ms": 1000 * seconds,
            "last_ms": 1000 * row["step_time"],
            "wait": _mean(rows, "data_wait"),
            "rate": batch / seconds,
            "tokens": tokens,
            "tokens_of_copy": tokens / config.parallel.data_parallel,
            "tera_flops": flops / 1e12,
            "mean_loss": _mean(advanced or rows, "loss"),
            "lm_loss": f"lm loss: {_mean(advanced, 'loss'):.6E} | " if advanced else "",
            "skips": len(rows) - len(advanced),
            "nans": sum(not math.isfinite(each["loss"]) for each in rows),
            "overflow": row["skipped"] and not row["outlier"],
            "float32_rate": np.float32(row["learning_rate"]),
        }

    def _epoch_values(self, step: int) -> dict[str, Any]:
        epoch, within, steps = self.place(step)
        return {
            "epoch": epoch,
            "epoch_from_1": epoch + 1,
            "within": within,
            "step_from_1": within + 1,
            "epoch_steps": steps,
            "now": datetime.now(),
        }

    def _own_line(self, row: Row) -> str:
        parts = [
            f"step {row['step']}/{self.last_step}",
            f"loss {row['loss']:.4f}",
            f"lr {row['learning_rate']:.3e}",
            f"grad norm {row['grad_norm']:.3f}",
            f"{row['tokens_per_second']:.0f} tokens/s",
            f"{row['step_time'] * 1000:.0f} ms",
        ]
        if row["data_wait"] > WAIT_WORTH_A_WORD * row["step_time"]:
            parts.append(f"data wait {row['data_wait'] / row['step_time']:.0%}")
        if row["mfu"]:
            parts.append(f"MFU {row['mfu']:.1%}")
        parts.append(f"{row['peak_memory'] / GIB:.2f} GiB")
        if self._times and row["step"] < self.last_step:
            # at the median speed of recent steps, without validations and saves
            done, whole = map(self.batches.samples_after, (row["step"], self.last_step))
            seconds = (whole - done) * statistics.median(self._times)
            parts.append(f"eta {timedelta(seconds=round(seconds))}")
        if row["loss_scale"] != 1.0:
            parts.append(f"loss scale {row['loss_scale']:g}")
        if row["skipped"]:
            parts.append(f"SKIPPED ({'outlier' if row['outlier'] else 'gradient not finite'})")
        return " | ".join(parts)

    def place(self, step: int) -> tuple[int, int, int]:
        """Return the epoch, the step within it, both from 0, and the steps of that epoch."""
        if self._epoch_samples:
            return place_in_epochs(step, self.batches, self._epoch_samples)
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        return epoch, within, self.steps_per_epoch


def bits_a_byte(row: Row) -> str:
    """Return what follows the perplexity of a validation in a line, if the bytes are known."""
    bits = row.get("validation_bits_per_byte")
    return "" if bits is None else f", {bits:.4f} bits a byte"


def part_lines(row: Row) -> list[str]:
    """Return a line about the data sets of a blend, from the figures of a validation."""
    prefix = "validation_loss/"
    names = [key.removeprefix(prefix) for key in row if key.startswith(prefix)]
    parts = [f"{name} loss {row[prefix + name]:.4f} over {row[f'validation_tokens/{name}']} tokens" for name in names]
    return [f"validation by data set: {listed(parts)}"] if parts else []


def use_style(config: Run) -> None:
    """Use the prefix of logging.style for every further line of the log."""
    style = STYLES[config.logging.style]
    for handler in LOG.handlers:
        handler.setFormatter(logging.Formatter(style.prefix, style.time))


def _mean(rows: list[Row], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)

"""Log lines of steps and validations, in the style of logging.style.

``metrics.jsonl`` is the same in every style. Scripts that read the logs of Megatron-DeepSpeed,
PaddleFleetX, MindFormers, OneFlow or GPT2-Chinese can read these lines. The lines follow the format
strings of those systems character by character. They have a time in front only where those systems
write one.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from datetime import datetime, timedelta
from typing import Any, ClassVar

import numpy as np

from common.accelerators import GIB
from common.log import LOG, listed
from common.parallel.ramp import place_in_epochs
from common.parallel.run import Run
from common.weights.names import flops_per_token

Row = dict[str, Any]

WAIT_WORTH_A_WORD = 0.05
"""Share of a step spent waiting for data above which the line reports it."""

SLOW_FIRST_STEP = 10.0
"""Seconds of a first step from which on the log names its time."""

RECENT_STEPS = 100
"""Number of steps whose median time predicts the time left."""


class Report:
    """Report in this project's own style. Other styles are subclasses."""

    prefix = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    more_lines = True
    """Whether the first step and skipped ones get a line at any interval."""

    def __init__(self, config: Run, samples_per_epoch: int = 0) -> None:
        """Create a report. samples_per_epoch: 0 if unknown; all steps then belong to one epoch."""
        steps, batch = config.train.steps, config.train.global_batch_size
        self.config = config
        self.last_step = steps
        self.batches = config.batch_sizes
        self.steps_per_epoch = max(1, samples_per_epoch // batch) if samples_per_epoch else steps
        """Steps of an epoch of full batches."""
        self._ramp_samples = samples_per_epoch if self.batches.grows else 0
        """Samples of an epoch if the batch grows, else 0."""
        self._rows: list[Row] = []
        self._steps_seen = 0
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)

    def step(self, row: Row) -> None:
        """Log a step if a line is due. Lines with averages cover the steps since the previous
        line.
        """
        self._steps_seen += 1
        if self._steps_seen == 1 and row["step_time"] >= SLOW_FIRST_STEP:
            LOG.info(f"first step: {row['step_time']:.0f} s, with compilation and warm-up")
        # the first call of the engine compiles and fills caches
        if self._steps_seen > self.config.train.sink_size:
            self._times.append(row["step_time"] / row["global_batch_size"])
        if self._rows:  # keep only the averaged values of older rows
            self._rows[-1] = {
                name: self._rows[-1][name]
                for name in ("step_time", "data_wait", "loss", "skipped", "global_batch_size")
            }
        self._rows.append(row)
        if (
            row["step"] % self.config.logging.interval == 0
            or row["step"] == self.last_step
            or (self.more_lines and (self._steps_seen == 1 or row["skipped"]))
        ):
            for line in self.step_lines(self._rows):
                LOG.info(line)
            self._rows = []
        hashes = self.config.logging.hash_interval
        # the summary of a run has that of its last step
        if hashes and row["step"] % hashes == 0 and row["step"] != self.last_step:
            LOG.info(
                f"data: {row['consumed_samples']} samples up to step {row['step']}, hash"
                f" {row['sample_hash']}"
            )

    def validation(self, row: Row) -> None:
        for line in (*self.validation_lines(row), *part_lines(row)):
            LOG.info(line)

    def step_lines(self, rows: list[Row]) -> list[str]:
        """Return the lines for ``rows``, the steps since the last line (at least one)."""
        row = rows[-1]
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
        seconds = self.seconds_left(row["step"])
        if seconds is not None:
            parts.append(f"eta {timedelta(seconds=round(seconds))}")
        if row["loss_scale"] != 1.0:
            parts.append(f"loss scale {row['loss_scale']:g}")
        if row["skipped"]:
            parts.append(f"SKIPPED ({'outlier' if row['outlier'] else 'gradient not finite'})")
        return [" | ".join(parts)]

    def seconds_left(self, step: int) -> float | None:
        """Return the time for the remaining samples at the median speed of recent steps.

        Validations and saves are not included. None before the second step and after the last.
        """
        if not self._times or step >= self.last_step:
            return None
        left = self.batches.samples_after(self.last_step) - self.batches.samples_after(step)
        return left * statistics.median(self._times)

    def validation_lines(self, row: Row) -> list[str]:
        loss, perplexity = row["validation_loss"], row["validation_perplexity"]
        return [
            f"validation at step {row['step']}: loss {loss:.4f}, perplexity {perplexity:.2f}"
            f"{bits_a_byte(row)} over {row['validation_tokens']} tokens"
        ]

    def epoch_and_step(self, step: int) -> tuple[int, int]:
        """Return the epoch and the step within it, both from 0."""
        return self.place(step)[:2]

    def place(self, step: int) -> tuple[int, int, int]:
        """Return the epoch, the step within it, both from 0, and the steps of that epoch.

        Samples count while a batch grows. Otherwise all epochs have whole batches and one length,
        as those systems count them.
        """
        if self._ramp_samples:
            return place_in_epochs(step, self.batches, self._ramp_samples)
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        return epoch, within, self.steps_per_epoch


class MegatronReport(Report):
    """Style of Megatron-DeepSpeed: ``training_log``, ``evaluate_and_print_results`` and ``steps:``
    of its pipeline engine.

    The ModelZoo scripts read word 10 of lines with samples/sec and word 15 of lines with validation
    loss. So nothing may be written in front of them.
    """

    prefix = logging.Formatter("%(message)s")
    more_lines = False

    def step_lines(self, rows: list[Row]) -> list[str]:
        row, batch = rows[-1], _mean(rows, "global_batch_size")
        seconds = _mean(rows, "step_time")
        advanced = [row for row in rows if not row["skipped"]]
        devices = self.config.topology.world_size
        tera_flops = (
            flops_per_token(self.config.model)
            * batch
            * self.config.model.seq_length
            / seconds
            / devices
            / 1e12
        )
        parts = [
            f" iteration {row['step']:8d}/{self.last_step:8d}",
            f"consumed samples: {row['consumed_samples']:12d}",
            f"consumed tokens: {row['consumed_samples'] * self.config.model.seq_length:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000:.1f}",
            f"learning rate: {row['learning_rate']:.3E}",
            f"global batch size: {row['global_batch_size']:5d}",
            *([f"lm loss: {_mean(advanced, 'loss'):.6E}"] if advanced else []),
            f"loss scale: {row['loss_scale']:.1f}",
            f"grad norm: {row['grad_norm']:.3f}",
            f"number of skipped iterations: {len(rows) - len(advanced):3d}",
            f"number of nan iterations: {sum(not math.isfinite(row['loss']) for row in rows):3d}",
            f"samples per second: {batch / seconds:.3f}",
            f"TFLOPs: {tera_flops:.2f}",
        ]
        deepspeed = (
            f"steps: {row['step']} loss: {row['loss']:0.4f} iter time (s): {seconds:0.3f}"
            f" samples/sec: {batch / seconds:0.3f}"
        )
        return [deepspeed, " | ".join(parts) + " |"]

    def validation_lines(self, row: Row) -> list[str]:
        loss = row["validation_loss"]
        line = (
            f" validation loss at iteration {row['step']} | lm loss value: {loss:.6E} | lm loss"
            f" PPL: {math.exp(min(20, loss)):.6E} | "
        )
        dashes = "-" * (len(line) + 1)
        return [dashes, line, dashes]


class FleetXReport(Report):
    """Style of PaddleFleetX: its line of 2022-07 and its ``[eval]`` line. Later versions omit some
    parts.
    """

    prefix = logging.Formatter("[%(asctime)s] [%(levelname)8s] - %(message)s")
    more_lines = False

    def step_lines(self, rows: list[Row]) -> list[str]:
        row = rows[-1]
        epoch, batch = self.epoch_and_step(row["step"])
        seconds = _mean(rows, "step_time")
        tokens = _mean(rows, "global_batch_size") * self.config.model.seq_length / seconds
        return [
            f"global step {row['step']}, epoch: {epoch}, batch: {batch}, loss: {row['loss']:.9f},"
            f" avg_reader_cost: {_mean(rows, 'data_wait'):.5f} sec, avg_batch_cost: {seconds:.5f}"
            f" sec, speed: {1 / seconds:.2f} step/s, ips_total: {tokens:.0f} tokens/s, ips:"
            f" {tokens / self.config.parallel.data_parallel:.0f} tokens/s, learning rate:"
            f" {row['learning_rate']:.5e}"
        ]

    def validation_lines(self, row: Row) -> list[str]:
        windows = self.config.validation.micro_batch_size
        batches = -(-row["validation_tokens"] // (windows * self.config.model.seq_length))
        seconds = row["validation_time"] / batches
        epoch, _ = self.epoch_and_step(row["step"])
        return [
            f"[eval] epoch: {epoch}, batch: {batches - 1}, loss: {row['validation_loss']:.9f},"
            f" avg_eval_cost: {seconds:.5f} sec, speed: {1 / seconds:.2f} step/s"
        ]


class MindFormersReport(Report):
    """Style of MindFormers r0.3's loss monitor, with the evaluation line of MindSpore's."""

    prefix = logging.Formatter("%(asctime)s - mindformers - %(levelname)s - %(message)s")
    more_lines = False

    def __init__(self, config: Run, samples_per_epoch: int = 0) -> None:
        super().__init__(config, samples_per_epoch)
        self._epoch = (-1, 0.0, 0)
        """Number of the epoch, and the sum and count of its losses that this process saw."""

    def step(self, row: Row) -> None:
        number, total, count = self._epoch
        epoch, _ = self.epoch_and_step(row["step"])
        self._epoch = (
            (epoch, total + row["loss"], count + 1) if epoch == number else (epoch, row["loss"], 1)
        )
        super().step(row)

    def step_lines(self, rows: list[Row]) -> list[str]:
        row = rows[-1]
        epoch, step, steps = self.place(row["step"])
        epochs = self.place(self.last_step)[0] + 1
        return [
            f"Epoch:[{epoch + 1:3d}/{epochs:3d}], step:[{step + 1:5d}/{steps:5d}],"
            f" loss:[{row['loss']:5.3f}/{self._epoch[1] / self._epoch[2]:5.3f}],"
            f" time:{row['step_time'] * 1000:5.3f} ms, lr:{np.float32(row['learning_rate'])!s},"
            f" overflow cond: {row['skipped'] and not row['outlier']}, loss_scale:"
            f" {row['loss_scale']}"
        ]

    def validation_lines(self, row: Row) -> list[str]:
        epoch, _ = self.epoch_and_step(row["step"])
        metrics = {"loss": row["validation_loss"], "PPL": row["validation_perplexity"]}
        return [f"Eval result: epoch {epoch + 1}, metrics: {metrics}"]


class OneFlowReport(Report):
    """Table of OneFlow-Benchmark's ``Metric``, its default ``--metric-print-format``.

    Its ``print`` puts nothing in front of a line. Throughput is in samples a second and latency in
    seconds a step. Both and the loss are means over the steps since the previous line.
    """

    prefix = logging.Formatter("%(message)s")
    more_lines = False
    _WIDTHS: ClassVar[dict[str, int]] = {
        "step": 8, "micro_batches": 15, "samples": 15, "throughput": 10, "latency": 10, "loss": 10,
    }  # fmt: skip

    def __init__(self, config: Run, samples_per_epoch: int = 0) -> None:
        super().__init__(config, samples_per_epoch)
        self._titled = False
        """Whether the last line of the log belongs to a table."""

    def step_lines(self, rows: list[Row]) -> list[str]:
        cells = {
            name: f"{value:.5f}" if isinstance(value, float) else str(value)
            for name, value in self.values(rows).items()
        }
        head = [{name: name for name in cells}, {name: "-" * self._WIDTHS[name] for name in cells}]
        lines = [cells] if self._titled else [*head, cells]
        self._titled = True
        return [self._line(each) for each in lines]

    def values(self, rows: list[Row]) -> dict[str, int | float]:
        """Return the values of the columns, in order."""
        row, seconds, train = rows[-1], _mean(rows, "step_time"), self.config.train
        advanced = [each for each in rows if not each["skipped"]] or rows
        return {
            "step": row["step"],
            "micro_batches": self.batches.samples_after(row["step"])
            // (train.micro_batch_size * self.config.parallel.data_parallel),
            "samples": row["consumed_samples"],
            "throughput": _mean(rows, "global_batch_size") / seconds,
            "latency": seconds,
            "loss": _mean(advanced, "loss"),
        }

    def validation_lines(self, row: Row) -> list[str]:
        """Return our own line, since OneFlow has no validation. The next table has a title
        again.
        """
        self._titled = False
        return super().validation_lines(row)

    def _line(self, cells: dict[str, str]) -> str:
        return "".join(f"| {cell:<{self._WIDTHS[name]}} " for name, cell in cells.items()) + "|"


class OneFlowPlainReport(OneFlowReport):
    """Values of the table on one line, ``--metric-print-format normal``."""

    def step_lines(self, rows: list[Row]) -> list[str]:
        return [
            "".join(
                f"{name}={value:.5f}," if isinstance(value, float) else f"{name}={value},"
                for name, value in self.values(rows).items()
            )
        ]


class GPT2ChineseReport(Report):
    """Lines that GPT2-Chinese's train.py and eval.py print.

    Windows of the whole corpus are shuffled together here. So an epoch has one piece, and its steps
    are counted through it.
    """

    prefix = logging.Formatter("%(message)s")
    more_lines = False

    def __init__(self, config: Run, samples_per_epoch: int = 0) -> None:
        super().__init__(config, samples_per_epoch)
        self._samples = samples_per_epoch or self.batches.samples_after(self.last_step)

    def epoch_and_step(self, step: int) -> tuple[int, int]:
        """Return the epoch and its step, both from 0. The model is written after the last step of
        an epoch.
        """
        return place_in_epochs(step, self.batches, self._samples)[:2]

    def step_lines(self, rows: list[Row]) -> list[str]:
        """Return a line with the mean loss of the steps since the previous line.

        train.py intends the same, but divides its first sum by one step too many.
        """
        epoch, step = self.epoch_and_step(rows[-1]["step"])
        loss = _mean([row for row in rows if not row["skipped"]] or rows, "loss")
        return [f"{self._step_of_piece(step)} of epoch {epoch + 1}, loss {loss}"]

    def validation_lines(self, row: Row) -> list[str]:
        step = self.epoch_and_step(row["step"])[1]
        return [f"{self._step_of_piece(step)}, ppl {row['validation_perplexity']}"]

    def _step_of_piece(self, step: int) -> str:
        now = datetime.now()
        return f"now time: {now.hour}:{now.minute}. Step {step + 1} of piece 0"


STYLES: dict[str, type[Report]] = {
    "gpt2": Report,
    "megatron": MegatronReport,
    "fleetx": FleetXReport,
    "mindformers": MindFormersReport,
    "oneflow": OneFlowReport,
    "oneflow-normal": OneFlowPlainReport,
    "gpt2-chinese": GPT2ChineseReport,
}


def bits_a_byte(row: Row) -> str:
    """Return what follows the perplexity of a validation in a line, if the bytes are known."""
    bits = row.get("validation_bits_per_byte")
    return "" if bits is None else f", {bits:.4f} bits a byte"


def part_lines(row: Row) -> list[str]:
    """Return a line about the data sets of a blend, from the figures of a validation."""
    prefix = "validation_loss/"
    names = [key.removeprefix(prefix) for key in row if key.startswith(prefix)]
    parts = [
        f"{name} loss {row[prefix + name]:.4f} over {row[f'validation_tokens/{name}']} tokens"
        for name in names
    ]
    return [f"validation by data set: {listed(parts)}"] if parts else []


def make_report(config: Run, samples_per_epoch: int = 0) -> Report:
    """Return the report of a style. train.num_samples says how long its epochs are, else the
    data.
    """
    return STYLES[config.logging.style](config, config.train.num_samples or samples_per_epoch)


def use_style(config: Run) -> None:
    """Use the prefix of logging.style for every further line of the log."""
    for handler in LOG.handlers:
        handler.setFormatter(STYLES[config.logging.style].prefix)


def _mean(rows: list[Row], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)

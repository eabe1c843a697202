"""Lines of each style against the format strings, the scripts and a line of the log of the system they come from."""

import logging
import math
import re
import subprocess
import time
from itertools import accumulate
from typing import Any

import pytest

from common.log import LOG, start_log
from common.parallel.run import Run
from common.training.loop import validation_figures
from common.training.report import STYLES, Report, use_style
from tests.tiny import tiny_config


def make_config(style: str, world_size: int = 1, **changes: Any) -> Run:
    model = {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "seq_length": 1024, "vocab_size": 50257}
    usual: dict[str, Any] = {
        "model": model,
        "train": {"max_steps": 500000, "micro_batch_size": 1, "global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-5},
        "logging": {"style": style},
    }
    return tiny_config(ranks=world_size, **(usual | changes))


def make_row(step: int, **values: Any) -> dict[str, Any]:
    seconds = values.get("step_time", 2.0)
    row = {
        "loss": 3.25, "learning_rate": 1.5e-4, "global_batch_size": 8, "grad_norm": 1.25,
        "step_time": seconds, "data_wait": 0.25, "mfu": 0.0, "tokens_per_second": 8192 / seconds,
        "peak_memory": 3 * 2**29, "loss_scale": 65536.0, "skipped": False, "outlier": False,
        "step": step, "consumed_samples": 8 * step, "sample_hash": "0123456789abcdef",
    }  # fmt: skip
    return row | values


VALIDATION = {"validation_loss": 3.0, "validation_perplexity": 20.0, "validation_tokens": 8, "validation_time": 1.0}


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Any:
    """Lines that the report of a config prints for rows."""

    def say(config: Run, rows: list[dict[str, Any]], samples_per_epoch: int = 800) -> list[str]:
        start_log()
        report = Report(config, samples_per_epoch)
        LOG.handlers[0].setFormatter(logging.Formatter("%(message)s"))
        for row in rows:
            report.validation(VALIDATION | row) if "loss" not in row else report.step(row)
        return capsys.readouterr().out.splitlines()

    return say


def test_megatron(lines: Any) -> None:
    """training_log of Megatron-DeepSpeed b4d4a0e: averages since the line before; DeepSpeed's line before it."""
    broken = make_row(2, loss=math.inf, grad_norm=math.nan, skipped=True)
    rows = [make_row(1, loss=5.0, step_time=1.0), broken, make_row(3, loss=4.0)]
    found = lines(make_config("megatron", logging__interval=3), rows)
    seconds = (1.0 + 2.0 + 2.0) / 3
    parameters = 50257 * 1024 + 24 * (12 * 1024**2 + 13 * 1024) + 2 * 1024
    tera = (6 * parameters + 12 * 24 * 1024 * 1024) * 8192 / seconds / 1e12
    form = (
        " iteration {:8d}/{:8d} | consumed samples: {:12d} | consumed tokens: {:12d} |"
        " elapsed time per iteration (ms): {:.1f} | learning rate: {:.3E} |"
        " global batch size: {:5d} | lm loss: {:.6E} | loss scale: {:.1f} | grad norm: {:.3f} |"
        " number of skipped iterations: {:3d} | number of nan iterations: {:3d} |"
        " samples per second: {:.3f} | TFLOPs: {:.2f} |"
    )
    speed = (8 / seconds, tera)
    steps = (3, 500000, 24, 24 * 1024, seconds * 1000, 1.5e-4, 8)
    expected = form.format(*steps, 4.5, 65536, 1.25, 1, 1, *speed)
    assert found == ["steps: 3 loss: 4.0000 iter time (s): 1.667 samples/sec: 4.800", expected]


def test_the_modelzoo_scripts_read_the_log(lines: Any) -> None:
    """Their own grep and awk: mean of the samples/sec of DeepSpeed's lines, smallest perplexity."""
    rows = [make_row(1, step_time=2.0), make_row(2, step_time=4.0)]
    rows += [{"step": 1, "validation_loss": 4.0}, {"step": 1000, "validation_loss": 3.0}]
    found = lines(make_config("megatron"), rows)
    log, form = "\n".join(found), "lm loss value: {:.6E} | lm loss PPL: {:.6E} | "
    last = " validation loss at iteration 1000 | " + form.format(3.0, math.exp(3.0))
    dashes = "-" * (len(last) + 1)
    assert found[-3:] == [dashes, last, dashes]

    def shell(command: str) -> float:
        return float(subprocess.check_output(["bash", "-c", command], input=log, text=True))

    mean = "awk '{print $10}' | awk '{sum+=$1} END {print sum/NR}'"
    least = "awk 'BEGIN {min = 65536} {if ($1+0 < min+0) min=$1} END {print min}'"
    assert shell(f"grep 'samples/sec' | tail -n 100 | {mean}") == 3.0
    perplexity = shell(f"grep 'validation loss at iteration' | awk '{{print $15}}' | {least}")
    assert perplexity == pytest.approx(math.exp(3.0), rel=1e-6)


def test_fleetx(lines: Any) -> None:
    """The line of hybrid_parallel.md of 2022-07: 8 devices, 8 windows of 1024 tokens a step, 100 steps an epoch; and
    release/2.4's validation_step_end.
    """
    times = {"data_wait": 0.23392, "step_time": 2.05344}
    row = make_row(251, loss=11.083364487, learning_rate=5.55556e-09, **times)
    validation = {"step": 251, "validation_loss": 3.5, "validation_tokens": 5 * 1024}
    form = "[eval] epoch: %d, batch: %d, loss: %.9f, avg_eval_cost: %.5f sec, speed: %.2f step/s"
    config = make_config("fleetx", world_size=8, logging__interval=251)
    assert lines(config, [row, validation | {"validation_time": 2.0}]) == [
        "global step 251, epoch: 2, batch: 50, loss: 11.083364487, avg_reader_cost: 0.23392 sec, avg_batch_cost:"
        " 2.05344 sec, speed: 0.49 step/s, ips_total: 3989 tokens/s, ips: 499 tokens/s, learning rate: 5.55556e-09",
        form % (2, 4, 3.5, 0.4, 2.5),
    ]


def test_mindformers(lines: Any) -> None:
    """MFLossMonitor of r0.3; the second loss is the mean of the epoch so far, of 2 steps."""
    # 0.00030000000000000003, which their float32 does not know
    values = {"learning_rate": 3 * 1e-4}
    rows = [make_row(step, loss=loss, skipped=step == 4, **values) for step, loss in enumerate((9.0, 7.0, 8.0, 6.0), 1)]
    rows.append({"step": 4})
    config = make_config("mindformers", train__max_steps=5)
    *found, validation = lines(config, rows, samples_per_epoch=17)
    form = (
        "Epoch:[%3d/  3], step:[%5d/    2], loss:[%5.3f/%5.3f], time:2000.000 ms, lr:0.0003,"
        " overflow cond: %s, loss_scale: 65536.0"
    )
    cells = [(1, 1, 9, 9, False), (1, 2, 7, 8, False), (2, 1, 8, 8, False), (2, 2, 6, 7, True)]
    assert found == [form % each for each in cells]
    assert validation == "Eval result: epoch 2, metrics: {'loss': 3.0, 'PPL': 20.0}"


def test_num_samples_is_the_epoch_of_the_log(lines: Any) -> None:
    """--num_samples 40 of 1,177 rows in batches of 8: 5 steps, and no 147."""
    config = make_config("mindformers", train__max_steps=None, train__max_epochs=2, train__num_samples=40)
    first, second = lines(config, [make_row(5), make_row(6)], samples_per_epoch=1177)
    assert first.startswith("Epoch:[  1/  2], step:[    5/    5]")
    assert second.startswith("Epoch:[  2/  2], step:[    1/    5]")


@pytest.mark.parametrize("style", ["fleetx", "mindformers"])
def test_epochs_of_a_growing_batch_are_counted_in_samples(lines: Any, style: str) -> None:
    """Sums say which epoch of 13 samples a step is in."""
    sizes = [2, 2, 2, 4, 4, 6] + [8] * 7
    ramp = {"train__rampup_batch_size": [2, 2, 16], "train__max_steps": len(sizes)}
    epoch_of = [(total - 1) // 13 for total in accumulate(sizes)]
    rows = [make_row(step, global_batch_size=size) for step, size in enumerate(sizes, 1)]
    found = lines(make_config(style, **ramp), rows, samples_per_epoch=13)
    for line, (number, epoch) in zip(found, enumerate(epoch_of), strict=True):
        within = number - epoch_of.index(epoch)
        if style == "fleetx":
            assert f"epoch: {epoch}, batch: {within}," in line
            continue
        steps = f"step:[{within + 1:5d}/"
        assert line.startswith(f"Epoch:[{epoch + 1:3d}/{epoch_of[-1] + 1:3d}], {steps}")
        assert epoch == epoch_of[-1] or f"{steps}{epoch_of.count(epoch):5d}]" in line


def test_gpt2_chinese(lines: Any) -> None:
    """The format strings of train.py and eval.py. Of 17 samples in batches of 4 an epoch has 4 steps, and the fourth
    one 5; the loss is the mean since the line before.
    """
    train = {"max_steps": 17, "global_batch_size": 4, "micro_batch_size": 4}
    config = make_config("gpt2-chinese", train=train, logging__interval=2, logging__hash_interval=0)
    rows = [make_row(step, loss=float(step)) for step in range(1, 18)]
    found = lines(config, rows, samples_per_epoch=17)
    parts = re.compile(r"now time: \d+:\d+\. Step (\d+) of piece 0 of epoch (\d+), loss (.+)")
    numbers = [tuple(map(float, parts.fullmatch(line).groups())) for line in found]  # type: ignore[union-attr]
    steps = [(step, epoch) for epoch in (1, 2, 3, 4) for step in (2, 4)]
    assert numbers == [(*each, 1.5 + 2 * n) for n, each in enumerate(steps)] + [(5, 4, 17.0)]
    [line] = lines(config, [{"step": 6, "validation_perplexity": 12.5}], samples_per_epoch=17)
    assert re.fullmatch(r"now time: \d+:\d+\. Step 2 of piece 0, ppl 12\.5", line)


def test_oneflow_writes_a_table_or_lines(lines: Any) -> None:
    """Metric.step_print_by_table of OneFlow-Benchmark: 2 micro batches a step of 8 windows; a validation ends a
    table. Metric.step_print: the loss of a skipped step is of no part.
    """
    keys = {"logging__interval": 2, "train__micro_batch_size": 4, "logging__hash_interval": 0}
    steps = [(9.0, 3.0), (8.0, 1.0), (7.5, 0.5), (7.25, 0.25), (7.0, 0.25), (6.0, 0.25)]
    rows = [make_row(n, loss=loss, step_time=time) for n, (loss, time) in enumerate(steps, 1)]
    rows.insert(4, {"step": 4})
    title = [
        "| step     | micro_batches   | samples         | throughput | latency    | loss       |",
        "| -------- | --------------- | --------------- | ---------- | ---------- | ---------- |",
    ]
    form = "| %-8d | %-15d | %-15d | %-10.5f | %-10.5f | %-10.5f |"
    assert lines(make_config("oneflow", **keys), rows) == [
        *title,
        form % (2, 4, 16, 4.0, 2.0, 8.5),
        form % (4, 8, 32, 64 / 3, 0.375, 7.375),
        "validation at step 4: loss 3.0000, perplexity 20.00 over 8 tokens",
        *title,
        form % (6, 12, 48, 32.0, 0.25, 6.5),
    ]
    rows = [make_row(1), make_row(2, loss=math.inf, skipped=True)]
    assert lines(make_config("oneflow-normal", logging__interval=2), rows)[0] == (
        "step=2,micro_batches=16,samples=16,throughput=4.00000,latency=2.00000,loss=3.25000,"
    )


def test_our_words(lines: Any) -> None:
    config = make_config("gpt2", logging__interval=2)
    waiting = make_row(2, data_wait=0.3, mfu=0.25)
    skipped = make_row(3, skipped=True, outlier=True, data_wait=0.09, mfu=None)
    begins, first, second = lines(config, [make_row(1), waiting, skipped])
    assert begins.startswith("step 1/500000 | loss "), "at any interval"
    # 499998 steps of 2 s
    assert first == (
        "step 2/500000 | loss 3.2500 | lr 1.500e-04 | grad norm 1.250 | 4096 tokens/s | 2000 ms"
        " | data wait 15% | MFU 25.0% | 1.50 GiB | eta 11 days, 13:46:36 | loss scale 65536"
    )
    assert second.endswith("SKIPPED (outlier)") and "data wait" not in second
    assert "MFU" not in second, "of a device whose peak is not known"


def test_the_time_left_is_the_median_of_recent_steps(lines: Any) -> None:
    """Without the first step of the process, which compiles, and validations; a resumed run counts only the rest."""
    config = make_config("gpt2", train__max_steps=1000, logging__hash_interval=0)
    validation, seconds = {"step": 903, "validation_time": 500.0}, [60.0, 1.0, 2.0, 9.0]
    rows = [make_row(900 + n, step_time=time) for n, time in enumerate(seconds, 1)]
    first, *found = lines(config, [*rows[:3], validation, rows[3], make_row(1000)])
    assert first.endswith("first step: 60 s, with compilation and warm-up")
    times = [re.search(r"eta ([\d:]+)", line) for line in found]
    # 98 steps of 1 s, 97 of 1.5 s, 96 of 2 s; none before the second step, of a validation and at the end
    assert [time and time[1] for time in times] == [None, "0:01:38", "0:02:26", None, "0:03:12", None]


STEP = r"(?:[Ss]tep |iteration +|step:\[ *|^\| |^step=)(\d+)"
PREFIXES = {
    "gpt2": "12:40:00 ",
    "fleetx": "[2022-07-27 12:40:00,833] [    INFO] - ",
    "mindformers": "2022-07-27 12:40:00,833 - mindformers - INFO - ",
}


@pytest.mark.parametrize("style", STYLES)
def test_intervals_and_the_prefix_of_a_line(lines: Any, capsys: pytest.CaptureFixture[str], style: str) -> None:
    """The last step speaks too. The hash of the data has an interval of its own; the summary has the last one."""
    rows = [make_row(step, sample_hash=f"{step:016x}") for step in range(1, 11)]
    for interval, hashes in ((5, [5]), (0, [])):
        keys = {"logging__interval": 4, "logging__hash_interval": interval}
        says = lines(make_config(style, train__max_steps=10, **keys), rows)
        assert [line for line in says if "hash" in line] == [
            f"data: {8 * step} samples up to step {step}, hash {step:016x}" for step in hashes
        ]
        found = [re.search(STEP, line) for line in says if "hash" not in line]
        numbers = [int(match[1]) for match in found if match]
        assert numbers == ([1, 4, 8, 10] if style == "gpt2" else [4, 8, 10])
    start_log()
    use_style(make_config(style))
    record = logging.LogRecord("gpt2", logging.INFO, "", 0, "words", None, None)
    record.created, record.msecs = time.mktime((2022, 7, 27, 12, 40, 0, 0, 0, -1)), 833.0
    LOG.handle(record)
    assert capsys.readouterr().out == PREFIXES.get(style, "") + "words\n"


@pytest.mark.parametrize("style", ["gpt2", "megatron"])
def test_the_parts_of_a_blend_have_a_line_of_their_own(lines: Any, style: str) -> None:
    """Scripts read words of the lines with "validation loss", so this line does not hold that."""
    figures = validation_figures({"a": (6.0, 2), "b": (3.0, 1), "empty": (0.0, 0)}, {})
    assert figures["validation_loss"] == 3.0 and figures["validation_tokens"] == 3
    *_, parts = lines(make_config(style), [{"step": 4, **figures}])
    said = ", ".join(("a loss 3.0000 over 2 tokens", "b loss 3.0000 over 1 tokens", "empty loss nan over 0 tokens"))
    assert parts == f"validation by data set: {said}"
    many = {f"part{number}": (1.0, 1) for number in range(300)}
    *_, parts = lines(make_config(style), [{"step": 4, **validation_figures(many, {})}])
    assert parts.endswith(", part15 loss 1.0000 over 1 tokens and 284 more")
    alone = {"validation_loss": 1e6, "validation_perplexity": math.inf, "validation_tokens": 2}
    assert validation_figures({"a": (2e6, 2)}, {}) == alone


def test_bits_a_byte_follow_the_perplexity(lines: Any) -> None:
    """A loss of ln 2 is one bit."""
    figures = validation_figures({"a": (2 * math.log(2), 2), "b": (3 * math.log(2), 1)}, {"a": 8, "b": 2})
    bits = [figures[f"validation_bits_per_byte{ending}"] for ending in ("", "/a", "/b")]
    assert bits == pytest.approx([0.5, 0.25, 1.5])
    line, _ = lines(make_config("gpt2"), [{"step": 4, **figures}])
    assert line == ("validation at step 4: loss 1.1552, perplexity 3.17, 0.5000 bits a byte over 3 tokens")

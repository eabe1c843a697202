"""Figures that a study takes from the folder of a finished run.

Traces tell the parts of a step that go into messages and into the update, and the most bytes of
tensors that a step makes. Events are told apart by names that torch's and MindSpore's profilers
give them. A trace of another form, such as an Ascend's, yields nothing rather than a guess.
"""

from __future__ import annotations

import gzip
import math
import re
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.run_config import load_config
from common.structured_files import MalformedError, parse_json_item, read_json_mapping
from common.training.metrics import MEMORY_FILE, METRICS_FILE, read_metrics
from gpt2_study.results import Cell, Measured

TRACED_STEPS = 2
"""Steps after the measured ones that are traced, which slows them down."""
_SOURCES = {
    "cpu": "resident memory of the process, less what it had before the model was made",
    "cuda": "most that torch or MindSpore had allocated on the device",
    "npu": "most that torch or MindSpore had allocated on the device",
}


def trace_settings(backend: str, first: int) -> dict[str, Any]:
    """Return the settings that trace TRACED_STEPS steps from ``first`` on.

    Allocations are recorded too, where the backend does so on every device.
    """
    return {"profile.start": first, "profile.stop": first + TRACED_STEPS - 1, "profile.memory": backend == "torch"}


def measure(cell: Cell, folder: Path, *, warmup_steps: int) -> Measured:
    """Return the measurements of the run in ``folder``.

    warmup_steps: steps at the start whose times are left out, as are those of traced steps. Raises
    DataError where the run recorded no other step, and ConfigError without its configuration.
    """
    path = folder / METRICS_FILE
    try:
        rows = read_metrics(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; the run wrote no metrics") from None
    steps = [row for row in rows if "loss" in row]
    traces = {}  # by rank and steps
    for file in (folder / "profile").glob("steps_*_rank_*.json.gz"):
        if match := _NAME.fullmatch(file.name):
            first, last, number = map(int, match.groups())
            traces[number, range(first, last + 1)] = read_trace(file)
    traces = dict(sorted(traces.items(), key=lambda each: (each[0][0], each[0][1].start)))
    traced = {step for _, numbers in traces for step in numbers}
    timed = [row for row in steps[warmup_steps:] if row["step"] not in traced]
    if not timed:
        raise DataError(
            f"{path}: {len(steps)} steps, expected more than the {warmup_steps} of warm-up; the run ended too early"
        )
    config = load_config(folder / "config.yaml", ())
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    mfu = [row["mfu"] for row in timed if row.get("mfu")]
    memory: dict[str, Any] = {"device": "", "ranks": []}
    if (folder / MEMORY_FILE).exists():
        memory = read_json_mapping(folder / MEMORY_FILE, error=DataError)
    allocated = {rank: trace.allocated for (rank, _), trace in traces.items()}
    parts = [{"state": rank["state"], "step": allocated.get(number)} for number, rank in enumerate(memory["ranks"])]
    known = [{part: size for part, size in each.items() if size is not None} for each in parts]
    full = config.train.global_batch_size or 0
    samples = statistics.median_low(int(row.get("global_batch_size", full)) for row in timed)
    return Measured(
        step_seconds=[float(row["step_time"]) for row in timed],
        tokens_per_step=samples * (config.model.seq_length or 0),
        samples_per_step=samples,
        loss=[_number(row["loss"]) for row in steps],
        gradient_norm=[_number(row["grad_norm"]) for row in steps],
        validation_loss=_number(validation[-1]) if validation else None,
        sample_hash=next((row["sample_hash"] for row in reversed(steps) if row.get("sample_hash")), None),
        peak_memory=[rank["peak"] - rank["at_start"] for rank in memory["ranks"]],
        peak_memory_source=_SOURCES.get(memory["device"], ""),
        memory_parts=max(known, key=lambda each: sum(each.values()), default={}),
        split=_split(cell.ranks, steps, timed, traces),
        mfu=statistics.median(mfu) if mfu else None,
        first_step_seconds=float(steps[0]["step_time"]),
    )


def _number(value: float | None) -> float:
    """Metrics hold null where a value was not finite."""
    return math.nan if value is None else float(value)


def _split(
    ranks: int,
    steps: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]],
    traces: Mapping[tuple[int, range], Trace],
) -> dict[str, float | None]:
    """Return the seconds of each part of the median step.

    The wait for data is measured in every step. The rest is divided as the traced steps are, in the
    mean of the ranks that were traced.
    """
    data = statistics.median(float(row["data_wait"]) for row in timed)
    rest = statistics.median(float(row["step_time"]) for row in timed) - data
    shares = []
    for (_, numbers), trace in traces.items():
        within = [row for row in steps if row["step"] in numbers]
        seconds = sum(float(row["step_time"]) - float(row["data_wait"]) for row in within)
        if trace.messages is not None and trace.update is not None and seconds > 0:
            shares.append((trace.messages / seconds, trace.update / seconds))
    forward = update = None
    communication = None if ranks > 1 else 0.0
    if shares:
        messages, updates = (statistics.fmean(column) for column in zip(*shares, strict=True))
        messages = messages if ranks > 1 else 0.0
        communication, update, forward = rest * messages, rest * updates, rest * (1 - updates - messages)
    return {"data": data, "forward_backward": forward, "communication": communication, "update": update}


MAX_BYTES = 2**29
"""Bytes of the text of a trace, at most; a longer one is not read."""
_NAME = re.compile(r"steps_(\d+)_(\d+)_rank_(\d+)\.json\.gz")
_FORMS = {
    "torch": ("user_annotation (gloo|nccl|hccl):", r"user_annotation Optimizer\.step#", "cpu_op aten::"),
    # its own time counts: kernels, and the annotation as the GPU went through it
    "torch on a GPU": ("kernel (nccl:|nccl(Dev)?Kernel)", r"gpu_user_annotation Optimizer\.step#", "kernel "),
    "mindspore": (
        r"CPU OP .*(All(Reduce|Gather|ToAll)|ReduceScatter|Broadcast|Send|Receive)\w*-op\d+$",
        r"CPU OP .*(Adam|Apply|SGD|Momentum)\w*-op\d+$",
        "CPU OP ",
    ),
}
"""Patterns of messages, of the update and of other work in a trace: an event's category, of MindSpore's its process,
and its name. The first one counts.
"""
Spans = list[tuple[float, float]]
"""Begin and end in microseconds."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Sums over the traced steps of one rank."""

    messages: float | None
    """Seconds of messages while nothing else was computed, waiting for other ranks included."""
    update: float | None
    """Seconds of the optimizer's own work."""
    allocated: int | None
    """Most bytes of tensors on the host that these steps made; None where they were not recorded."""


def read_trace(path: Path) -> Trace:
    """Raises DataError where the file is damaged."""
    events = _events(path)
    # blocks from before the trace are in no sum
    changes = sorted(
        (float(event["ts"]), int(event["args"]["Bytes"]))
        for event in events
        if event.get("name") == "[memory]" and event.get("args", {}).get("Device Type") == 0
    )
    allocated = max(accumulate((size for _, size in changes), initial=0)) if changes else None
    if (spans := _spans(events)) is None:
        return Trace(messages=None, update=None, allocated=allocated)
    messages, update, work = spans
    return Trace(
        messages=(_covered(messages + work) - _covered(work)) / 1e6,
        update=(_covered(update + messages) - _covered(messages)) / 1e6,
        allocated=allocated,
    )


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            return []
        found, _ = parse_json_item(content.decode("utf-8").lstrip())
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, MalformedError) as error:
        raise DataError(f"{path}: not a trace: {error}; the run was cut off") from None
    events = found.get("traceEvents", []) if isinstance(found, dict) else found
    return [event for event in events if isinstance(event, dict)]


def _spans(events: list[dict[str, Any]]) -> tuple[Spans, Spans, Spans] | None:
    """Return messages, update and all other work. None where this is neither a trace of torch's nor MindSpore's of a
    processor, which holds one span an operator; or where it is of a device whose names are not known here.
    """
    kinds = {event.get("cat") for event in events}
    processes = {
        event.get("pid"): event.get("args", {}).get("name")
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    if "cpu_op" in kinds:
        form = "torch on a GPU" if "kernel" in kinds else "torch"
        is_known = form != "torch" or "privateuse1_runtime" not in kinds
    else:
        form = "mindspore"
        is_known = "CPU OP" in processes.values() and "Ascend Hardware" not in processes.values()
    if not is_known:
        return None
    patterns = [re.compile(pattern) for pattern in _FORMS[form]]
    found: tuple[Spans, Spans, Spans] = ([], [], [])
    for event in events:
        if event.get("ph") == "X" and {"name", "ts"} <= event.keys():
            kind = processes.get(event.get("pid")) if form == "mindspore" else event.get("cat")
            text = f"{kind} {event['name']}"
            spans = next((spans for spans, pattern in zip(found, patterns, strict=True) if pattern.match(text)), None)
            if spans is not None:
                begin = float(event["ts"])  # MindSpore writes a text
                spans.append((begin, begin + float(event.get("dur", 0))))
    return found


def _covered(spans: Spans) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total

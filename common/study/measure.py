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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError
from common.run_config import load_config
from common.structured_files import MalformedError, parse_json_item, read_json_mapping
from common.study.results import Cell, Measured
from common.training.metrics import MEMORY_FILE, METRICS_FILE, read_metrics

TRACED_STEPS = 2
"""Steps after the measured ones that are traced, which slows them down."""
PARTS = ("data", "forward_backward", "communication", "update")
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
    DataError where the run recorded no other step.
    """
    path = folder / METRICS_FILE
    try:
        rows = read_metrics(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; the run wrote no metrics") from None
    steps = [row for row in rows if "loss" in row]
    files = find_traces(folder)
    traced = {step for file in files for step in file.steps}
    timed = [row for row in steps[warmup_steps:] if row["step"] not in traced]
    if not timed:
        raise DataError(
            f"{path}: {len(steps)} steps, expected more than the {warmup_steps} of warm-up; the run ended too early"
        )
    try:
        config = load_config(folder / "config.yaml", ())
    except ConfigError as error:
        raise DataError(str(error)) from None
    traces = {file: read_trace(file.path) for file in files}
    seconds = [float(row["step_time"]) for row in timed]
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    mfu = [row["mfu"] for row in timed if row.get("mfu")]
    memory: dict[str, Any] = {"device": "", "ranks": []}
    if (folder / MEMORY_FILE).exists():
        memory = read_json_mapping(folder / MEMORY_FILE, error=DataError)
    full = config.train.global_batch_size or 0
    samples = statistics.median_low(int(row.get("global_batch_size", full)) for row in timed)
    return Measured(
        step_seconds=seconds,
        tokens_per_step=samples * (config.model.seq_length or 0),
        samples_per_step=samples,
        loss=[_number(row["loss"]) for row in steps],
        gradient_norm=[_number(row["grad_norm"]) for row in steps],
        validation_loss=_number(validation[-1]) if validation else None,
        sample_hash=next((row["sample_hash"] for row in reversed(steps) if row.get("sample_hash")), None),
        peak_memory=[rank["peak"] - rank["at_start"] for rank in memory["ranks"]],
        peak_memory_source=_SOURCES.get(memory["device"], ""),
        memory_parts=_parts(memory["ranks"], traces),
        split=_split(cell.ranks, steps, timed, traces),
        mfu=statistics.median(mfu) if mfu else None,
        first_step_seconds=float(steps[0]["step_time"]),
    )


def _number(value: float | None) -> float:
    """Metrics hold null where a value was not finite."""
    return math.nan if value is None else float(value)


def _parts(ranks: Sequence[Mapping[str, int]], traces: Mapping[TraceFile, Trace]) -> dict[str, int]:
    """Return the parts of the rank whose counted parts are largest in sum."""
    allocated = {file.rank: trace.allocated for file, trace in traces.items()}
    found = []
    for number, rank in enumerate(ranks):
        step = allocated.get(number)
        found.append({"state": rank["state"]} | ({} if step is None else {"step": step}))
    return max(found, key=lambda parts: sum(parts.values()), default={})


def _split(
    ranks: int,
    steps: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]],
    traces: Mapping[TraceFile, Trace],
) -> dict[str, float | None]:
    """Return the seconds of each part of the median step.

    The wait for data is measured in every step. The rest is divided as the traced steps are, in the
    mean of the ranks that were traced.
    """
    split: dict[str, float | None] = dict.fromkeys(PARTS)
    data = statistics.median(float(row["data_wait"]) for row in timed)
    rest = statistics.median(float(row["step_time"]) for row in timed) - data
    split["data"] = data
    shares = []
    for file, trace in traces.items():
        within = [row for row in steps if row["step"] in file.steps]
        seconds = sum(float(row["step_time"]) - float(row["data_wait"]) for row in within)
        if trace.messages is not None and trace.update is not None and seconds > 0:
            shares.append((trace.messages / seconds, trace.update / seconds))
    if shares:
        messages, update = (statistics.fmean(column) for column in zip(*shares, strict=True))
        split["communication"] = rest * messages if ranks > 1 else 0.0
        split["update"] = rest * update
        split["forward_backward"] = rest * (1 - update - (messages if ranks > 1 else 0.0))
    elif ranks == 1:
        split["communication"] = 0.0
    return split


MAX_BYTES = 2**29
"""Bytes of the text of a trace, at most; a longer one is not read."""
_NAME = re.compile(r"steps_(\d+)_(\d+)_rank_(\d+)\.json\.gz")
_MESSAGES = re.compile(r"(gloo|nccl|hccl):|ncclDevKernel|ncclKernel")
"""torch's annotations of collectives on a CPU, NCCL's kernels on a GPU."""
_UPDATE = re.compile(r"Optimizer\.step#")
_MINDSPORE_MESSAGES = re.compile(r"(All(Reduce|Gather|ToAll)|ReduceScatter|Broadcast|Send|Receive)\w*-op\d+$")
_MINDSPORE_UPDATE = re.compile(r"(Adam|Apply|SGD|Momentum)\w*-op\d+$")

Spans = list[tuple[float, float]]
"""Begin and end in microseconds."""


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """A file of the folder ``profile`` of a run."""

    path: Path
    steps: range
    rank: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Sums over the traced steps of one rank."""

    messages: float | None
    """Seconds of messages while nothing else was computed, waiting for other ranks included."""
    update: float | None
    """Seconds of the optimizer's own work."""
    allocated: int | None
    """Most bytes of tensors on the host that these steps made; None where they were not recorded."""


def find_traces(folder: Path) -> list[TraceFile]:
    """Return the traces of a run, in the order of ranks."""
    found = []
    for path in (folder / "profile").glob("steps_*_rank_*.json.gz"):
        if match := _NAME.fullmatch(path.name):
            first, last, rank = map(int, match.groups())
            found.append(TraceFile(path=path, steps=range(first, last + 1), rank=rank))
    return sorted(found, key=lambda each: (each.rank, each.steps.start))


def read_trace(path: Path) -> Trace:
    """Raises DataError where the file is damaged."""
    events = _events(path)
    spans = _torch_spans(events) or _mindspore_spans(events)
    messages = update = None
    if spans is not None:
        during_messages, during_update, during_work = (_union(each) for each in spans)
        messages = _length(_without(during_messages, during_work)) / 1e6
        update = _length(_without(during_update, during_messages)) / 1e6
    return Trace(messages=messages, update=update, allocated=_most_allocated(events))


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            return []
        text = content.decode("utf-8").lstrip()
        found, _ = parse_json_item(text)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, MalformedError) as error:
        raise DataError(f"{path}: not a trace: {error}; the run was cut off") from None
    events = found.get("traceEvents", []) if isinstance(found, dict) else found
    return [event for event in events if isinstance(event, dict)]


def _torch_spans(events: list[dict[str, Any]]) -> tuple[Spans, Spans, Spans] | None:
    """Return messages, update and all other work; None where this is not a trace of torch's, or of a device whose names
    are not known here.

    Where a GPU worked, its own time counts: kernels and, for the update, the annotation as the GPU went through it.
    """
    kinds = {event.get("cat") for event in events}
    if "cpu_op" not in kinds:
        return None
    on_gpu = "kernel" in kinds
    if not on_gpu and any(event.get("cat") == "privateuse1_runtime" for event in events):
        return None
    notes, work = ("gpu_user_annotation", "kernel") if on_gpu else ("user_annotation", "cpu_op")
    messages = _spans(events, {"kernel"} if on_gpu else {notes}, _MESSAGES)
    update = _spans(events, {notes}, _UPDATE)
    busy = [
        _span(event)
        for event in _done(events)
        if event.get("cat") == work
        and (on_gpu or str(event["name"]).startswith("aten::"))
        and not _MESSAGES.match(str(event["name"]))
    ]
    return messages, update, busy


def _mindspore_spans(events: list[dict[str, Any]]) -> tuple[Spans, Spans, Spans] | None:
    """Return the same of a processor's trace, which holds one span an operator."""
    names = {
        event.get("pid"): event.get("args", {}).get("name")
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    if "Ascend Hardware" in names.values() or "CPU OP" not in names.values():
        return None
    operators = [event for event in _done(events) if names.get(event.get("pid")) == "CPU OP"]
    sorted_out: tuple[Spans, Spans, Spans] = ([], [], [])
    for event in operators:
        name = str(event["name"])
        kind = 0 if _MINDSPORE_MESSAGES.search(name) else 1 if _MINDSPORE_UPDATE.search(name) else 2
        sorted_out[kind].append(_span(event))
    return sorted_out


def _done(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (event for event in events if event.get("ph") == "X" and {"name", "ts"} <= event.keys())


def _spans(events: list[dict[str, Any]], kinds: set[str], names: re.Pattern[str]) -> Spans:
    return [_span(event) for event in _done(events) if event.get("cat") in kinds and names.match(str(event["name"]))]


def _span(event: dict[str, Any]) -> tuple[float, float]:
    begin = float(event["ts"])  # MindSpore writes a text
    return begin, begin + float(event.get("dur", 0))


def _union(spans: Spans) -> Spans:
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _without(spans: Spans, taken: Spans) -> Spans:
    """Return the parts of spans that taken does not cover. Both ascend and do not overlap."""
    left: Spans = []
    at = 0
    for begin, end in spans:
        while at < len(taken) and taken[at][1] <= begin:
            at += 1
        for other_begin, other_end in taken[at:]:
            if other_begin >= end:
                break
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _most_allocated(events: list[dict[str, Any]]) -> int | None:
    """Return the greatest sum of what was allocated on the host and not yet freed. Blocks from
    before the trace are in no sum.
    """
    changes = sorted(
        (float(event["ts"]), int(event["args"]["Bytes"]))
        for event in events
        if event.get("name") == "[memory]" and event.get("args", {}).get("Device Type") == 0
    )
    if not changes:
        return None
    held = most = 0
    for _, size in changes:
        held += size
        most = max(most, held)
    return most

"""Figures that a study takes from the folder of a finished run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.schema import RunConfig
from common.errors import ConfigError, DataError
from common.run_config import load_config
from common.structured_files import read_json_mapping
from common.study.results import Cell, Measured
from common.study.traces import Trace, TraceFile, find_traces, read_trace
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
    config = _config(folder)
    traces = {file: read_trace(file.path) for file in files}
    seconds = [float(row["step_time"]) for row in timed]
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    mfu = [row["mfu"] for row in timed if row.get("mfu")]
    memory = _memory(folder)
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


def _config(folder: Path) -> RunConfig:
    try:
        return load_config(folder / "config.yaml", ())
    except ConfigError as error:
        raise DataError(str(error)) from None


def _memory(folder: Path) -> dict[str, Any]:
    if not (folder / MEMORY_FILE).exists():
        return {"device": "", "ranks": []}
    return read_json_mapping(folder / MEMORY_FILE, error=DataError)


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

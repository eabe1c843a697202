"""Reading of traces, on events written by hand; and unions of spans against a grid."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError
from common.study.traces import Trace, read_trace


def write(path: Path, events: list[dict[str, Any]], *, as_list: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump(events if as_list else {"traceEvents": events}, file)
    return path


def span(name: str, begin: float, end: float, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin} | more


def test_a_processors_trace_of_torch(tmp_path: Path) -> None:
    """Messages count where nothing was computed beside them: 30 to 40 and 60 to 100 of this one."""
    events = [
        span("aten::addmm", 0, 30),
        span("autograd::engine::evaluate_function: AddmmBackward0", 0, 60),
        span("aten::mm", 40, 60),
        span("c10d::allreduce_", 41, 42),
        span("gloo:all_reduce", 20, 70, "user_annotation"),
        span("gloo:all_reduce", 65, 100, "user_annotation"),
        span("Optimizer.step#AdamW.step", 100, 125, "user_annotation"),
        span("Optimizer.zero_grad#AdamW.zero_grad", 125, 130, "user_annotation"),
    ]
    assert read_trace(write(tmp_path / "t.json.gz", events)) == Trace(
        messages=pytest.approx(50e-6), update=pytest.approx(25e-6), allocated=None
    )


def test_a_gpus_time_counts_where_one_worked(tmp_path: Path) -> None:
    """Events of the host meanwhile tell nothing: it is ahead of the GPU."""
    events = [
        span("aten::mm", 0, 100),
        span("Optimizer.step#AdamW.step", 5, 6, "user_annotation"),
        span("Optimizer.step#AdamW.step", 80, 95, "gpu_user_annotation"),
        span("nccl:all_reduce", 1, 2, "user_annotation"),
        span("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 10, 50, "kernel"),
        span("gemm_kernel", 0, 30, "kernel"),
        span("multi_tensor_apply_kernel", 80, 95, "kernel"),
    ]
    found = read_trace(write(tmp_path / "t.json.gz", events))
    assert (found.messages, found.update) == (pytest.approx(20e-6), pytest.approx(15e-6))


def test_a_processors_trace_of_mindspore(tmp_path: Path) -> None:
    """Its times are texts, scopes repeat what their operators took, and it is a list."""

    def process(number: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}

    def operator(name: str, begin: float, end: float, pid: int = 2) -> dict[str, Any]:
        return {"ph": "X", "name": name, "pid": pid, "ts": str(begin), "dur": end - begin}

    events = [
        process(2, "CPU OP"),
        process(3, "Scope Layer"),
        operator("Default/model-GPT2/MatMul-op1", 0, 40),
        operator("Default/gradient_sync-GradientSync/AllReduce-op0", 40, 70),
        operator("Default/Adam-op0", 70, 80),
        operator("Default/ApplyGradientDescent-op0", 80, 85),
        operator("gradient_sync-GradientSync", 40, 90, pid=3),
    ]
    found = read_trace(write(tmp_path / "t.json.gz", events, as_list=True))
    assert found == Trace(
        messages=pytest.approx(30e-6), update=pytest.approx(15e-6), allocated=None
    )
    events.append(process(4, "Ascend Hardware"))
    unknown = Trace(messages=None, update=None, allocated=None)
    assert read_trace(write(tmp_path / "t.json.gz", events, as_list=True)) == unknown


def test_most_bytes_allocated(tmp_path: Path) -> None:
    """In the order of time, on the host; what was there before the trace is freed as 0 bytes."""
    changes = [(1, 100), (4, -100), (2, 50), (3, 25), (5, 90), (6, -50)]
    events = [
        {"ph": "i", "name": "[memory]", "ts": at, "args": {"Bytes": size, "Device Type": 0}}
        for at, size in changes
    ]
    events.append(
        {"ph": "i", "name": "[memory]", "ts": 2, "args": {"Bytes": 999, "Device Type": 1}}
    )
    assert read_trace(write(tmp_path / "t.json.gz", events)).allocated == 175


def test_unions_of_spans_are_those_of_a_grid(tmp_path: Path) -> None:
    """Random spans with whole numbers as borders, against sets of unit pieces."""
    generator = random.Random(0)
    for _ in range(100):
        pieces: dict[str, set[int]] = {"gloo:send": set(), "aten::add": set()}
        events = [span("aten::add", -1, -1)]
        for _ in range(generator.randrange(12)):
            name = generator.choice(list(pieces))
            begin = generator.randrange(40)
            end = begin + generator.randrange(12)
            cat = "cpu_op" if name.startswith("aten") else "user_annotation"
            events.append(span(name, begin, end, cat))
            pieces[name] |= set(range(begin, end))
        expected = len(pieces["gloo:send"] - pieces["aten::add"]) / 1e6
        found = read_trace(write(tmp_path / "t.json.gz", events))
        assert found.messages == pytest.approx(expected, abs=1e-12)


def test_a_trace_that_was_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", [span("aten::mm", 0, 1)] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"t\.json\.gz: not a trace: .*; the run was cut off"):
        read_trace(path)
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError, match="not a trace"):
        read_trace(path)

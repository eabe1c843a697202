"""Figures of a run's folder and of its traces, written by hand; unions of spans against a grid."""

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config, save_config
from common.errors import DataError
from gpt2_study.measure import Trace, measure, read_trace
from gpt2_study.results import Cell
from tests.tiny import tiny_run

GLOBAL_BATCH, LENGTH = 8, 16


def cell(ranks: int) -> Cell:
    return Cell(id="one", axes={}, settings={}, backend="torch", engine="native", ranks=ranks)


Event = dict[str, Any]


def write(path: Path, events: list[Event], *, as_list: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump(events if as_list else {"traceEvents": events}, file)
    return path


def span(name: str, begin: float, end: float, cat: str = "cpu_op") -> Event:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin}


def bytes_at(time: int, size: int, device: int = 0) -> Event:
    changed = {"Bytes": size, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "ts": time, "args": changed}


def make_run(folder: Path, *, traced: bool = True) -> Path:
    """Two steps of warm-up, three measured, two traced. Rank 1's trace has twice the messages."""
    folder.mkdir()
    train = {"max_steps": 7, "micro_batch_size": 4, "global_batch_size": GLOBAL_BATCH}
    save_config(build_config(tiny_run(folder, train=train, parallel={"data_parallel": 2})), folder / "config.yaml")
    times = [9.0, 1.2, 1.0, 1.1, 1.4, 4.0, 4.2]
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": None if step == 4 else 5.0 - step / 10, "grad_norm": 1.5, "step_time": seconds}
        | {"data_wait": 0.1, "mfu": step / 100, "sample_hash": f"hash {step}"}
        for step, seconds in enumerate(times, 1)
    ]
    rows.append({"step": 7, "validation_loss": 4.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ranks = [{"peak": 900, "at_start": 300, "state": 100}, {"peak": 800, "at_start": 0, "state": 9}]
    (folder / "memory.json").write_text(json.dumps({"device": "cpu", "ranks": ranks}))
    for rank in (0, 1) if traced else ():
        events = [span("aten::mm", 0, 10), bytes_at(1, 50 + rank)]
        events.append(span("gloo:all_reduce", 10, 10 + 1e6 * (1 + rank), "user_annotation"))
        events.append(span("Optimizer.step#AdamW.step", 3e6, 3.4e6, "user_annotation"))
        write(folder / "profile" / f"steps_6_7_rank_{rank}.json.gz", events)
    return folder


def test_figures_of_a_run(tmp_path: Path) -> None:
    found = measure(cell(2), make_run(tmp_path / "run"), warmup_steps=2)
    assert found.step_seconds == [1.0, 1.1, 1.4]  # without warm-up and traced steps
    assert (found.tokens_per_step, found.samples_per_step) == (GLOBAL_BATCH * LENGTH, GLOBAL_BATCH)
    assert len(found.loss) == len(found.gradient_norm) == 7
    assert math.isnan(found.loss[3]) and found.loss[6] == 4.3
    assert (found.validation_loss, found.sample_hash) == (4.5, "hash 7")
    assert found.peak_memory == [600, 800]
    assert "before the model was made" in found.peak_memory_source
    assert found.memory_parts == {"state": 100, "step": 50}
    assert (found.mfu, found.first_step_seconds) == (0.04, 9.0)
    # of 8 traced seconds without data, 1 and 2 are messages and 0.4 the update; the median step has
    # 1 second without data
    assert found.split == {
        "data": pytest.approx(0.1),
        "communication": pytest.approx(1.5 / 8),
        "update": pytest.approx(0.4 / 8),
        "forward_backward": pytest.approx(1 - 1.9 / 8),
    }
    assert sum(filter(None, found.split.values())) == pytest.approx(1.1)


def test_figures_that_were_not_recorded_are_not_guessed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", traced=False)
    (folder / "memory.json").unlink()
    found = measure(cell(2), folder, warmup_steps=2)
    assert found.step_seconds == [1.0, 1.1, 1.4, 4.0, 4.2]
    unknown = dict.fromkeys(("forward_backward", "communication", "update"))
    assert found.split == {"data": pytest.approx(0.1), **unknown}
    assert found.peak_memory == [] and found.memory_parts == {} and found.peak_memory_source == ""
    assert measure(cell(1), folder, warmup_steps=2).split["communication"] == 0.0


def test_a_run_that_ended_too_early(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: .*; the run wrote no metrics"):
        measure(cell(1), tmp_path, warmup_steps=2)
    with pytest.raises(DataError, match=r"7 steps, expected more than the 5 of warm-up"):
        measure(cell(1), make_run(tmp_path / "run"), warmup_steps=5)


# ---- traces ----


def test_a_processors_trace_of_torch(tmp_path: Path) -> None:
    """Messages count where nothing was computed beside them: 30 to 40 and 60 to 100 of this one.
    Bytes are in the order of time, on the host; what was there before the trace is freed as 0 bytes.
    """
    changes = [(1, 100), (4, -100), (2, 50), (3, 25), (5, 90), (6, -50)]
    events = [*(bytes_at(*change) for change in changes), bytes_at(2, 999, device=1)]
    events += [
        span("aten::addmm", 0, 30),
        span("autograd::engine::evaluate_function: AddmmBackward0", 0, 60),
        span("aten::mm", 40, 60),
        span("c10d::allreduce_", 41, 42),
        span("gloo:all_reduce", 20, 70, "user_annotation"),
        span("gloo:all_reduce", 65, 100, "user_annotation"),
        span("Optimizer.step#AdamW.step", 100, 125, "user_annotation"),
        span("Optimizer.zero_grad#AdamW.zero_grad", 125, 130, "user_annotation"),
    ]
    found = read_trace(write(tmp_path / "t.json.gz", events))
    assert found == Trace(messages=pytest.approx(50e-6), update=pytest.approx(25e-6), allocated=175)


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
    assert found == Trace(messages=pytest.approx(20e-6), update=pytest.approx(15e-6), allocated=None)


def test_a_processors_trace_of_mindspore(tmp_path: Path) -> None:
    """Its times are texts, scopes repeat what their operators took, and it is a list."""

    def process(number: int, name: str) -> Event:
        return {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}

    def operator(name: str, begin: float, end: float, pid: int = 2) -> Event:
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
    assert found == Trace(messages=pytest.approx(30e-6), update=pytest.approx(15e-6), allocated=None)
    events.append(process(4, "Ascend Hardware"))
    unknown = Trace(messages=None, update=None, allocated=None)
    assert read_trace(write(tmp_path / "t.json.gz", events, as_list=True)) == unknown


def test_unions_of_spans_are_those_of_a_grid(tmp_path: Path) -> None:
    """Random spans with whole numbers as borders, against sets of unit pieces."""
    generator = random.Random(0)
    for _ in range(100):
        pieces: dict[str, set[int]] = {"gloo:send": set(), "aten::add": set()}
        events = [span("aten::add", -1, -1)]
        for _ in range(generator.randrange(12)):
            name, begin = generator.choice(list(pieces)), generator.randrange(40)
            end = begin + generator.randrange(12)
            events.append(span(name, begin, end, "cpu_op" if name == "aten::add" else "user_annotation"))
            pieces[name] |= set(range(begin, end))
        expected = len(pieces["gloo:send"] - pieces["aten::add"]) / 1e6
        found = read_trace(write(tmp_path / "t.json.gz", events))
        assert found.messages == pytest.approx(expected, abs=1e-12)


def test_a_trace_that_was_cut_off(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", [span("aten::mm", 0, 1)] * 100)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"t\.json\.gz: not a trace: .*; the run was cut off"):
        read_trace(path)

"""Figures of a run's folder: on a folder written by hand, whose figures are known."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from common.config.load import build_config, save_config
from common.errors import DataError
from common.study.measure import measure
from common.study.results import Cell

GLOBAL_BATCH, LENGTH = 8, 16


def cell(ranks: int) -> Cell:
    return Cell(id="one", axes={}, settings={}, backend="torch", engine="native", ranks=ranks)


def span(cat: str, name: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length}


def make_run(folder: Path, style: str = "gpt2", *, traced: bool = True) -> Path:
    """Two steps of warm-up, three measured, two traced. Rank 1's trace has twice the messages."""
    folder.mkdir()
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "model": {
            "num_layers": 1,
            "hidden_size": 8,
            "num_heads": 2,
            "seq_length": LENGTH,
            "vocab_size": 50,
        },
        "train": {"max_steps": 7, "micro_batch_size": 4, "global_batch_size": GLOBAL_BATCH},
        "optimizer": {"learning_rate": 0.1},
        "parallel": {"data_parallel": 2},
        "logging": {"style": style},
    }
    save_config(build_config(tree), folder / "config.yaml")
    times = [9.0, 1.2, 1.0, 1.1, 1.4, 4.0, 4.2]
    rows = [
        {
            "step": step,
            "loss": None if step == 4 else 5.0 - step / 10,
            "grad_norm": 1.5,
            "step_time": seconds,
            "data_wait": 0.1,
            "mfu": step / 100,
            "sample_hash": f"hash {step}",
        }
        for step, seconds in enumerate(times, 1)
    ]
    rows.append({"step": 7, "validation_loss": 4.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ranks = [{"peak": 900, "at_start": 300, "state": 100}, {"peak": 800, "at_start": 0, "state": 9}]
    (folder / "memory.json").write_text(json.dumps({"device": "cpu", "ranks": ranks}))
    for rank in (0, 1) if traced else ():
        (folder / "profile").mkdir(exist_ok=True)
        events = [
            span("cpu_op", "aten::mm", 0, 10),
            span("user_annotation", "gloo:all_reduce", 10, 1e6 * (1 + rank)),
            span("user_annotation", "Optimizer.step#AdamW.step", 3e6, 0.4e6),
            {
                "ph": "i",
                "name": "[memory]",
                "ts": 1,
                "args": {"Bytes": 50 + rank, "Device Type": 0},
            },
        ]
        name = f"steps_6_7_rank_{rank}.json.gz"
        with gzip.open(folder / "profile" / name, "wt") as file:
            json.dump({"traceEvents": events}, file)
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
    assert found.split == {
        "data": pytest.approx(0.1),
        "forward_backward": None,
        "communication": None,
        "update": None,
    }
    assert found.peak_memory == [] and found.memory_parts == {} and found.peak_memory_source == ""
    assert measure(cell(1), folder, warmup_steps=2).split["communication"] == 0.0


def test_a_run_that_ended_too_early(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: .*; the run wrote no metrics"):
        measure(cell(1), tmp_path, warmup_steps=2)
    with pytest.raises(DataError, match=r"7 steps, expected more than the 5 of warm-up"):
        measure(cell(1), make_run(tmp_path / "run"), warmup_steps=5)

"""The plan's memory against what runs of two ranks really allocated, as the study measures it."""

from pathlib import Path
from typing import Any

import pytest

from common.planner.plan import make_plan
from common.resolve.derive import resolve_config
from common.run_config import load_config
from common.study.measure import measure
from common.study.results import Cell
from tests.ranks import run_ranks
from tests.tiny import tiny_run

pytestmark = pytest.mark.long

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"parallel__model_parallel": 2, "train__recompute": "full"},
    "pipeline": {"parallel__pipeline_stage": 2},
    "gpipe": {
        "parallel__pipeline_stage": 2,
        "parallel__pipeline_schedule": "gpipe",
        "train__micro_batch_size": 8,
    },
    "zero2": {"parallel__zero_stage": 2, "profile__stop": 2},
    "deepspeed1": {"engine": "deepspeed", "parallel__zero_stage": 1},
    "deepspeed1_float16": {
        "engine": "deepspeed",
        "parallel__zero_stage": 1,
        "precision": {"parameters": "float16", "compute": "float16"},
    },
    "deepspeed3": {"engine": "deepspeed", "parallel__zero_stage": 3},
}


def test_state_and_steps_take_what_the_plan_says(tmp_path: Path, corpus_prefix: Path) -> None:
    """Within 10 %: state, and what a step allocates beside it, counted by torch's profiler.

    The micro batch is large: threads of gloo and DeepSpeed free a gathered weight (at most 2.5 of
    some 40 MB) now before, now after the next one is allocated.
    """
    base: dict[str, Any] = {
        "model__hidden_size": 64,
        "model__seq_length": 32,
        "model__vocab_size": 8000,
        "train": {"max_steps": 3, "micro_batch_size": 16, "global_batch_size": 32},
        "optimizer": {"learning_rate": 1e-3},
        "data__split": "100,0,0",
        "profile": {"start": 2, "stop": 3, "memory": True},
    }
    jobs = [
        tiny_run(tmp_path / name, corpus_prefix, **(base | changes))
        for name, changes in LAYOUTS.items()
    ]
    run_ranks(2, jobs, seconds=60.0)
    for name in LAYOUTS:
        folder = tmp_path / name
        cell = Cell(id=name, axes={}, settings={}, backend="torch", engine="native", ranks=2)
        found = measure(cell, folder, warmup_steps=0).memory_parts
        config = resolve_config(load_config(folder / "config.yaml", ()), world_size=2)
        memories = [stage.memory for stage in make_plan(config).stages]
        fullest = max(memories, key=lambda memory: memory.peak)
        state = fullest.weights + fullest.optimizer
        assert found["state"] == pytest.approx(state, rel=0.1), name
        assert found["step"] == pytest.approx(fullest.peak - state, rel=0.1), name

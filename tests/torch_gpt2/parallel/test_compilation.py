"""Graphs of torch.compile in each layout: their number, and the losses that they compute.

Here the graphs run operator by operator, which takes seconds less than kernels made for them. Tests
with such kernels are in test_layouts.py and test_engine.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.layouts import TOLERANCE, TORCH
from tests.ranks import run_ranks
from tests.tiny import params_of

pytestmark = pytest.mark.long

REGIONS = 4
"""Embedding, block, last norm and loss."""
STEPS = 50
WITH_MESSAGES = REGIONS + 1
"""Tensor parallelism sums gradients behind the last norm."""
LAYOUTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "one": ({"ranks": 1, "train__max_steps": STEPS}, [1]),
    "data": ({}, [REGIONS] * 2),
    "tensor": ({"parallel__model_parallel": 2}, [WITH_MESSAGES] * 2),
    "sequence": (
        {"parallel__model_parallel": 2, "parallel__sequence_parallel": True},
        [WITH_MESSAGES] * 2,
    ),
    "zero2": ({"parallel__zero_stage": 2}, [REGIONS] * 2),
    "zero3": ({"parallel__zero_stage": 3, "train__recompute": "full"}, [REGIONS] * 2),
    # the embedding and a block, a block with norm and loss
    "pipeline": ({"parallel__pipeline_stage": 2}, [2, 3]),
    "interleaved": (
        {"parallel__pipeline_stage": 2, "parallel__pipeline_schedule": "interleaved_1f1b"},
        [2, 3],
    ),
}
"""Settings of two ranks, and graphs of a forward pass by rank."""
IN_CAMPAIGN = ("sequence", "zero2", "interleaved")
CASES = [
    pytest.param(name, marks=pytest.mark.campaign if name in IN_CAMPAIGN else ())
    for name in LAYOUTS
]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest
) -> Path:
    """folder / layout, compiled, and folder / eager, which is one process without."""
    folder = tmp_path_factory.mktemp("compiled")
    jobs = [
        TORCH.job(folder / name, corpus_prefix, train__compile=True, **settings)
        for name, (settings, _) in LAYOUTS.items()
        if (name,) in params_of(request, "layout")
    ]
    jobs.append(TORCH.job(folder / "eager", corpus_prefix, ranks=1))
    run_ranks(2, jobs, watched="graph_counters")
    return folder


@pytest.mark.parametrize("layout", CASES)
def test_graphs_without_a_break_compute_the_losses_of_one_process(runs: Path, layout: str) -> None:
    """One set of graphs for training and one for validation, whose last batch is a shorter one."""
    for rank, graphs in enumerate(LAYOUTS[layout][1]):
        counts = json.loads((runs / layout / f"watched_{rank}.json").read_text())
        assert counts == {"forward": 2 * graphs, "backward": graphs, "breaks": 0}
    expected, found = (read_metrics(runs / name / "metrics.jsonl") for name in ("eager", layout))
    for key in ("loss", "grad_norm", "validation_loss"):
        values, mine = ([row[key] for row in rows if key in row] for rows in (expected, found))
        assert values and mine[: len(values)] == pytest.approx(values, rel=TOLERANCE), key

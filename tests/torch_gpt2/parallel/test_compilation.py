"""Graphs of torch.compile in each layout: their number, and the losses that they compute.

Here the graphs run operator by operator, which takes seconds less than kernels made for them. Tests
with such kernels are in test_layouts.py and test_engine.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.graph_counters import watch
from tests.layouts import TOLERANCE, TORCH
from tests.ranks import run_ranks
from tests.tiny import params_of
from tests.torch_gpt2.test_engine import make_config, make_engine, run, token_batches

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
def test_no_graph_breaks_and_none_is_made_again(runs: Path, layout: str) -> None:
    """One set of graphs for training and one for validation, whose last batch is a shorter one."""
    for rank, graphs in enumerate(LAYOUTS[layout][1]):
        counts = json.loads((runs / layout / f"watched_{rank}.json").read_text())
        assert counts == {"forward": 2 * graphs, "backward": graphs, "breaks": 0}


@pytest.mark.parametrize("layout", CASES)
def test_graphs_compute_the_losses_of_one_process_without(runs: Path, layout: str) -> None:
    expected, found = (read_metrics(runs / name / "metrics.jsonl") for name in ("eager", layout))
    for key in ("loss", "grad_norm", "validation_loss"):
        values = [row[key] for row in expected if key in row]
        assert values
        mine = [row[key] for row in found if key in row]
        assert mine[: len(values)] == pytest.approx(values, rel=TOLERANCE), key


def test_deep_models_are_compiled_by_regions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.resolve.compilation.MAX_LAYERS_IN_ONE_GRAPH", 1)
    config = make_config(train__compile=True)
    assert config.model.num_layers == 2
    with watch(tmp_path / "counts"):
        found = run(make_engine(config), token_batches(config)[:2])
    counts = json.loads((tmp_path / "counts").read_text())
    assert counts == {"forward": REGIONS, "backward": REGIONS, "breaks": 0}
    expected = run(make_engine(make_config()), token_batches(config)[:2])
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)

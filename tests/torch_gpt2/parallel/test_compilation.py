"""torch.compile in each layout: the number of graphs, and the losses that they compute.

Most graphs run operator by operator, which takes seconds less than kernels made for them.
parallel.async_tensor_parallel: which messages join a product.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import layouts
from tests.ranks import run_ranks
from tests.tiny import params_of, require_equal, rows_of

pytestmark = pytest.mark.long

LAYOUTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "one": ({"ranks": 1}, [1]),
    # embedding, block, last norm and loss
    "data": ({}, [4, 4]),
    # gradients are summed behind the last norm
    "tensor": (layouts.TENSOR, [5, 5]),
    "sequence": (layouts.SEQUENCE, [5, 5]),
    "zero2": (layouts.ZERO2, [4, 4]),
    "zero3": (layouts.SPLIT | layouts.RECOMPUTE, [4, 4]),
    # the embedding and a block, a block with norm and loss
    "pipeline": (layouts.PIPELINE, [2, 3]),
    "interleaved": (layouts.schedule("interleaved_1f1b"), [2, 3]),
}
"""Settings of two ranks, and graphs of a forward pass by rank."""
STEPS = 5
# one layer and no validation, since each graph takes its compiler ten seconds
SMALL: dict[str, Any] = {"model__num_layers": 1, "train__max_steps": STEPS, "optimizer__clip_grad": 1.0}
SMALL |= {"data__split": "100,0,0", "validation": {}}
COMPILED = {"train__compile": True, "train__micro_batch_size": 6}
QUANTIZING = SMALL | layouts.FEW_BITS | {"quantization": {"weights": "abs_max", "weight_bits": 4}}
ASYNC = {**layouts.SEQUENCE, "parallel__async_tensor_parallel": True, "watched": "joined_products"}
# those that join products come last, since their stand-ins for kernels stay
KERNELS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, layouts.SEQUENCE),
    "zero3": (2, layouts.SPLIT),
    "async": (2, ASYNC),
    "async recomputed": (2, ASYNC | layouts.RECOMPUTE),
    "async zero3": (4, ASYNC | layouts.SPLIT | {"train__micro_batch_size": 3}),
    "async pipeline": (4, ASYNC | layouts.PIPELINE | {"model__num_layers": 2}),
}
"""Ranks and settings of layouts with kernels of torch's compiler."""


def cases(rows: dict[str, Any], *in_campaign: str) -> list[Any]:
    marks = {name: pytest.mark.campaign for name in in_campaign}
    return [pytest.param(name, marks=marks.get(name, ())) for name in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest) -> Path:
    """graphs / layout and kernels / layout, compiled. Those without: eager, N layers, few bits."""
    folder, jobs = tmp_path_factory.mktemp("compiled"), []

    def add(name: str, *changes: dict[str, Any]) -> None:
        settings = {key: value for each in changes for key, value in each.items()}
        jobs.append(layouts.TORCH.job(folder / name, corpus_prefix, **settings))

    add("eager", {"ranks": 1})
    for (name,) in params_of(request, "layout"):
        watched = {"watched": "graph_counters", "train__compile": True, "ranks": 2}
        add(f"graphs/{name}", watched, LAYOUTS[name][0])
    chosen = [name for (name,) in params_of(request, "kernels")]
    if chosen and shutil.which(os.environ.get("CXX", "g++")):
        for layers in (1, 2):
            add(f"{layers} layers", SMALL, {"ranks": 1, "model__num_layers": layers})
        add("few bits", QUANTIZING, {"ranks": 1})
        add("few bits compiled", QUANTIZING, {"ranks": 1}, COMPILED)
        for name in chosen:
            ranks, settings = KERNELS[name]
            add(f"kernels/{name}", {"ranks": ranks}, SMALL, COMPILED, settings)
    most = max(job["ranks"] for job in jobs)
    # kernels are compiled in the ranks, without processes of its own
    run_ranks(most, jobs, variables={"TORCHINDUCTOR_COMPILE_THREADS": "1"}, seconds=90.0)
    return folder


@pytest.mark.parametrize("layout", cases(LAYOUTS, "tensor", "zero2", "interleaved"))
def test_graphs_without_a_break_compute_the_losses_of_one_process(runs: Path, layout: str) -> None:
    """One set of graphs for training and one for validation, whose last batch is a shorter one."""
    run = runs / "graphs" / layout
    for rank, graphs in enumerate(LAYOUTS[layout][1]):
        counts = json.loads((run / f"watched_{rank}.json").read_text())
        assert counts == {"forward": 2 * graphs, "backward": graphs, "breaks": 0}
    require_equal(run, runs / "eager", layouts.TOLERANCE)


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")),
    reason="no C++ compiler, which torch.compile needs on a CPU: neither g++ nor CXX",
)
@pytest.mark.parametrize("kernels", cases(KERNELS, *(name for name in KERNELS if name != "async")))
def test_kernels_compute_what_one_process_does(runs: Path, kernels: str) -> None:
    """Few bits of quantization are rounded alike; messages of a block join its products."""
    few, compiled = (layouts.figures(runs / name) for name in ("few bits", "few bits compiled"))
    assert len(few) == 6 and compiled == pytest.approx(few, rel=layouts.QUANTIZED)
    ranks, settings = KERNELS[kernels]
    run, one = runs / "kernels" / kernels, f"{settings.get('model__num_layers', 1)} layers"
    assert len(rows_of(runs / one)) == STEPS
    require_equal(run, runs / one, layouts.TOLERANCE)
    # two micro batches a step; two regions a pass, with a gather and a scatter each
    joined = STEPS * 2 * 2 * (3 if kernels == "async recomputed" else 2)
    for note in run.glob("watched_*.json"):
        counts = json.loads(note.read_text())
        assert counts.keys() == {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}
        # a pipeline runs a stage once before its first step
        assert min(counts.values()) >= joined and (ranks == 4 or set(counts.values()) == {joined})
    assert len([*run.glob("watched_*.json")]) == (ranks if kernels.startswith("async") else 0)

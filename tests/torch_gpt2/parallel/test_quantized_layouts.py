"""Quantization-aware training under every kind of layout against one process, and across a
resume.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import read_manifest
from common.training.metrics import read_metrics
from common.weights.initial import initial_rows
from common.weights.names import parameter_shapes
from tests.ranks import run_ranks
from tests.torch_gpt2.parallel.test_layouts import (
    PIPELINE,
    RECOMPUTE,
    SEQUENCE,
    SMALL,
    SPLIT,
    TENSOR,
    config_of,
    tree,
    weights_of,
)

pytestmark = pytest.mark.long

# Sums in another order differ by 1e-7, which rounds one activation in 10^5 to the next of its
# levels. With 4 bits and weights that hardly move there are few such: losses and norms of three
# steps differed by 1.4e-6 at most, those without quantization by 1e-2
TOLERANCE = 1e-5
STEPS = 3

SCHEMES: dict[str, dict[str, Any]] = {
    "averages": {"weights": "abs_max", "weight_bits": 4, "activation_bits": 4},
    "by token": {"activations": "dynamic", "weight_bits": 4, "activation_bits": 4},
}
SETTINGS: dict[str, Any] = {
    "train__max_steps": STEPS,
    "optimizer__learning_rate": 1e-3,
    "optimizer__clip_grad": 0.0,
    "validation__interval": STEPS,
}
LAYOUTS: dict[int, dict[tuple[str, str], dict[str, Any]]] = {
    2: {
        ("tp2 sp recomputed", "averages"): SEQUENCE | RECOMPUTE,
        ("tp2 sp", "by token"): SEQUENCE,
        ("zero3", "averages"): SPLIT,
        ("zbv", "averages"): PIPELINE | {"parallel__pipeline_schedule": "zbv_zero_bubble"},
    },
    4: {("dp2 tp2", "averages"): TENSOR},
}
CASES = [case for cases in LAYOUTS.values() for case in cases]


def job(folder: Path, corpus: Path, name: str, scheme: str, **changes: Any) -> dict[str, Any]:
    section = {"quantization": SCHEMES[scheme]}
    return tree(folder / name / scheme, corpus, **(section | SETTINGS | changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    """folder / layout / scheme. "resumed" continues step 2 of "one", and "float" does not round."""
    folder = tmp_path_factory.mktemp("quantized")
    second = folder / "one" / "averages" / "checkpoints" / "step_00000002"
    run_ranks(
        1,
        [
            job(folder, corpus_prefix, "one", "averages", checkpoint__interval=2),
            job(folder, corpus_prefix, "one", "by token"),
            job(folder, corpus_prefix, "resumed", "averages", checkpoint__resume=str(second)),
            tree(folder / "float", corpus_prefix, **SETTINGS),
        ],
    )
    for ranks, cases in LAYOUTS.items():
        jobs = [job(folder, corpus_prefix, *case, **changes) for case, changes in cases.items()]
        run_ranks(ranks, jobs)
    return folder


def figures(run: Path) -> list[float]:
    rows = read_metrics(run / "metrics.jsonl")
    keys = ("loss", "grad_norm", "validation_loss")
    return [row[key] for row in rows for key in keys if row.get(key)]


def averages(run: Path) -> dict[str, float]:
    checkpoint = find_checkpoint(run)
    assert checkpoint is not None
    state = read_manifest(checkpoint)["engine"].get("quantization", {})
    return {name: value / state["weight"] for name, value in state.get("accumulated", {}).items()}


@pytest.mark.parametrize(("layout", "scheme"), CASES)
def test_a_layout_trains_as_one_process(
    runs: Path, corpus_prefix: Path, layout: str, scheme: str
) -> None:
    one, many = runs / "one" / scheme, runs / layout / scheme
    assert figures(many) == pytest.approx(figures(one), rel=TOLERANCE)
    assert figures(runs / "float") != pytest.approx(figures(one), rel=100 * TOLERANCE)
    assert averages(many) == pytest.approx(averages(one), rel=TOLERANCE)
    assert len(averages(many)) == (24 if scheme == "averages" else 0)
    start = initial_weights(one, corpus_prefix)
    for name, values in weights_of(one, corpus_prefix).items():
        moved = values - start[name]
        other = weights_of(many, corpus_prefix)[name] - start[name]
        assert np.abs(other - moved).max() <= 1e-3 * np.abs(moved).max() + 1e-7, name


def initial_weights(run: Path, corpus: Path) -> dict[str, np.ndarray]:
    config = config_of(run, corpus)
    shapes = parameter_shapes(config.model)
    return {
        name: initial_rows(config.model, config.seed, name, shape) for name, shape in shapes.items()
    }


def test_a_resumed_run_equals_an_uninterrupted_one(runs: Path) -> None:
    whole, resumed = runs / "one" / "averages", runs / "resumed" / "averages"
    assert figures(resumed) == figures(whole)[-len(figures(resumed)) :]
    assert averages(resumed) == averages(whole)


@pytest.mark.campaign
def test_a_compiled_step_rounds_alike(tmp_path: Path, corpus_prefix: Path) -> None:
    names = {"plain": {}, "graph": {"train__compile": True}}
    run_ranks(
        1,
        [
            job(tmp_path, corpus_prefix, name, "averages", **(SMALL | SETTINGS | changes))
            for name, changes in names.items()
        ],
        seconds=300,
    )
    plain, graph = (figures(tmp_path / name / "averages") for name in names)
    assert graph == pytest.approx(plain, rel=TOLERANCE)

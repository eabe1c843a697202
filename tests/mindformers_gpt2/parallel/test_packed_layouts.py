"""Documents kept apart in a window under the layouts of the runner with hand-written communication:
losses, gradient norms and counted tokens equal one process's, and torch's.
"""

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
pytest.importorskip("torch")

from common.training.metrics import read_metrics
from tests.mindformers_gpt2.parallel.test_layouts import (
    BETWEEN_FRAMEWORKS,
    PIPELINE,
    TENSOR,
    TOLERANCE,
    ZERO,
    tree,
)
from tests.packed_corpus import FLAGS, write_packed_corpus
from tests.ranks import Job, run_ranks

pytestmark = pytest.mark.campaign

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, TENSOR),
    "zero1": (2, ZERO),
    "pp2": (2, PIPELINE),
    "pp2 dropout": (2, PIPELINE | {"model__hidden_dropout": 0.1}),
    "dp2 pp2": (4, PIPELINE | {"train__recompute": "full"}),
    "tp2 pp2": (4, TENSOR | PIPELINE),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """folder / layout; "one" and "dropout" are one process, "torch" is one of torch."""
    folder = tmp_path_factory.mktemp("packed")
    corpus = write_packed_corpus(folder)

    def job(name: str, **changes: Any) -> Job:
        small = {"train__max_steps": 2, "validation__interval": 0, "checkpoint__interval": 0}
        return tree(folder / name, corpus, **FLAGS, **small, **changes)

    run_ranks(1, [job("torch", backend="torch")])
    run_ranks(1, [job("one"), job("dropout", model__hidden_dropout=0.1)])
    for ranks in (2, 4):
        chosen = {name: keys for name, (wanted, keys) in LAYOUTS.items() if wanted == ranks}
        run_ranks(ranks, [job(name, **keys) for name, keys in chosen.items()])
    return folder


def require_equal(found: Path, wanted: Path, tolerance: float) -> None:
    one, many = (read_metrics(run / "metrics.jsonl") for run in (wanted, found))
    assert [row["step"] for row in one] == [1, 2, 2]
    for key in ("step", "sample_hash", "validation_tokens"):
        assert [row.get(key) for row in many] == [row.get(key) for row in one], key
    for key in ("loss", "grad_norm", "validation_loss"):
        assert [row.get(key) for row in many] == [
            value and pytest.approx(value, rel=tolerance) for value in (row.get(key) for row in one)
        ], key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_documents_apart_as_one_process(runs: Path, layout: str) -> None:
    one = "dropout" if "dropout" in layout else "one"
    require_equal(runs / layout, runs / one, TOLERANCE)


def test_documents_are_kept_apart_as_on_torch(runs: Path) -> None:
    require_equal(runs / "one", runs / "torch", BETWEEN_FRAMEWORKS)

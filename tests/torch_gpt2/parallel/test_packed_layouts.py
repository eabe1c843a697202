"""Documents kept apart in a window under every kind of layout and both engines: losses, gradient
norms and counted tokens equal one process's.
"""

from pathlib import Path
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.packed_corpus import FLAGS, write_packed_corpus
from tests.ranks import run_ranks
from tests.torch_gpt2.parallel.test_layouts import LAYOUTS, tree

pytestmark = pytest.mark.long

# float32 sums of the same terms in another order, as in test_layouts.py
TOLERANCE = 1e-6

ALL = {
    **LAYOUTS[2],
    "dp2": {},
    "recomputed": {"train__recompute": "selective", "ranks": 1},
    "deepspeed": {"engine": "deepspeed", "parallel__zero_stage": 2},
    "deepspeed pipeline": {"engine": "deepspeed", "parallel__pipeline_stage": 2},
    "deepspeed zero3": {"engine": "deepspeed", "parallel__zero_stage": 3},
}
IN_SUITE = ("dp2", "tp2 sp recomputed", "zero bubble")
CASES = [pytest.param(name, marks=() if name in IN_SUITE else pytest.mark.campaign) for name in ALL]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """folder / layout; "one" is one process."""
    folder = tmp_path_factory.mktemp("packed")
    corpus = write_packed_corpus(folder)
    campaign = any(
        item.path == request.path and item.get_closest_marker("campaign")
        for item in request.session.items
    )

    def job(name: str, **changes: Any) -> dict[str, Any]:
        small = {"train__max_steps": 3, "validation__interval": 0, "optimizer__clip_grad": 0.0}
        return tree(folder / name, corpus, data__train=str(corpus), **FLAGS, **small, **changes)

    run_ranks(1, [job("one")])
    chosen = [name for name in ALL if campaign or name in IN_SUITE]
    run_ranks(2, [job(name, **ALL[name]) for name in chosen])
    return folder


@pytest.mark.parametrize("layout", CASES)
def test_a_layout_keeps_documents_apart_as_one_process(runs: Path, layout: str) -> None:
    one, many = (read_metrics(runs / name / "metrics.jsonl") for name in ("one", layout))
    assert [row["step"] for row in one] == [1, 2, 3, 3]
    for key in ("step", "sample_hash", "validation_tokens"):
        assert [row.get(key) for row in many] == [row.get(key) for row in one], key
    for key in ("loss", "grad_norm", "validation_loss"):
        assert [row.get(key) for row in many] == [
            value and pytest.approx(value, rel=TOLERANCE) for value in (row.get(key) for row in one)
        ], key

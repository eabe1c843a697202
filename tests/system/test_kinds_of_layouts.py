"""One layout of each kind on both frameworks, against one process: what the short suite keeps of
the tests of layouts.

All layouts, precisions and changes of layout are in tests/torch_gpt2/parallel,
tests/torch_gpt2/deepspeed and tests/mindformers_gpt2/parallel, which the whole suite runs.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.ranks import run_ranks
from tests.torch_gpt2.parallel.test_layouts import (
    PIPELINE,
    SEQUENCE,
    SPLIT,
    STEPS,
    TENSOR,
    TOLERANCE,
    VARIANTS,
    tree,
)

pytestmark = pytest.mark.representative
CLIPPED = VARIANTS["clip"]
HALF = STEPS // 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor and sequence": SEQUENCE,
    "pipeline": PIPELINE,
    "zero": SPLIT | {"train__recompute": "full"},
}
if importlib.util.find_spec("deepspeed"):
    LAYOUTS["deepspeed"] = {"engine": "deepspeed", "parallel__zero_stage": 2}
    LAYOUTS["deepspeed with tensor parallel"] = {"engine": "deepspeed"} | TENSOR


@pytest.fixture(scope="module")
def torch_runs(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    run_ranks(1, [tree(folder / "one", corpus_prefix, **CLIPPED)])
    jobs = [
        tree(folder / name, corpus_prefix, **layout, **CLIPPED) for name, layout in LAYOUTS.items()
    ]
    first = tree(folder / "first half", corpus_prefix, **SEQUENCE, **CLIPPED, train__max_steps=HALF)
    second = {**PIPELINE, **CLIPPED, "checkpoint__resume": str(folder / "first half")}
    run_ranks(2, [*jobs, first, tree(folder / "second half", corpus_prefix, **second)])
    return folder


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def require_equal(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float
) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    assert [row["sample_hash"] for row in found] == [row["sample_hash"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == [
            pytest.approx(row[key], rel=tolerance) for row in expected
        ], key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_of_torch_equal_one_process(torch_runs: Path, layout: str) -> None:
    expected = rows_of(torch_runs / "one")
    assert len(expected) == STEPS
    require_equal(rows_of(torch_runs / layout), expected, TOLERANCE)


def test_a_run_changes_its_layout(torch_runs: Path) -> None:
    found = rows_of(torch_runs / "second half")
    assert [row["step"] for row in found] == list(range(HALF + 1, STEPS + 1)), (
        "it resumes, and does not start over"
    )
    require_equal(found, rows_of(torch_runs / "one")[HALF:], TOLERANCE)


def test_two_ranks_of_mindspore_equal_one_process(tmp_path: Path, corpus_prefix: Path) -> None:
    pytest.importorskip(
        "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
    )
    from tests.mindformers_gpt2.parallel.test_layouts import PIPELINE, TENSOR, TOLERANCE, tree

    run_ranks(1, [tree(tmp_path / "one", corpus_prefix)])
    run_ranks(
        2,
        [
            tree(tmp_path / name, corpus_prefix, **layout)
            for name, layout in (("tensor", TENSOR), ("pipeline", PIPELINE))
        ],
    )
    for name in ("tensor", "pipeline"):
        require_equal(rows_of(tmp_path / name), rows_of(tmp_path / "one"), TOLERANCE)

"""One layout of each kind on both frameworks, against one process: what the short suite keeps of the tests of layouts.

All layouts, precisions and changes of layout are in tests/torch_gpt2/parallel and tests/mindformers_gpt2/parallel,
which the whole suite runs.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.layouts import MINDSPORE, PIPELINE, SEQUENCE, SPLIT, STEPS, TENSOR, TOLERANCE, TORCH
from tests.ranks import run_ranks
from tests.tiny import require_equal, rows_of

pytestmark = pytest.mark.representative
CLIPPED = TORCH.numerics["clip"]
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

    def job(name: str, **changes: Any) -> dict[str, Any]:
        return TORCH.job(folder / name, corpus_prefix, **{**CLIPPED, **changes})

    jobs = [job("one", ranks=1), *(job(name, **layout) for name, layout in LAYOUTS.items())]
    jobs += [job("first half", **SEQUENCE, train__max_steps=HALF)]
    jobs += [job("second half", **PIPELINE, checkpoint__resume=str(folder / "first half"))]
    run_ranks(2, jobs)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_of_torch_equal_one_process(torch_runs: Path, layout: str) -> None:
    assert len(rows_of(torch_runs / "one")) == STEPS
    require_equal(torch_runs / layout, torch_runs / "one", TOLERANCE)


def test_a_run_changes_its_layout(torch_runs: Path) -> None:
    steps = [row["step"] for row in rows_of(torch_runs / "second half")]
    assert steps == list(range(HALF + 1, STEPS + 1)), "it resumes, and does not start over"
    # five steps and a validation
    require_equal(torch_runs / "second half", torch_runs / "one", TOLERANCE, last=HALF + 1)


def test_two_ranks_of_mindspore_equal_one_process(tmp_path: Path, corpus_prefix: Path) -> None:
    pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
    few = MINDSPORE.numerics["dropout"] | {"model__num_layers": 2}  # graphs that its compiler has soon
    run_ranks(1, [MINDSPORE.job(tmp_path / "one", corpus_prefix, **few)])
    layouts = {"tensor": TENSOR, "pipeline": PIPELINE}
    run_ranks(2, [MINDSPORE.job(tmp_path / name, corpus_prefix, **few | each) for name, each in layouts.items()])
    for name in layouts:
        require_equal(tmp_path / name, tmp_path / "one", TOLERANCE)

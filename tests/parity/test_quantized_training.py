"""Quantization-aware training on MindSpore, on one rank and on two, equals torch's on one process;
a run moves between them.
"""

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
pytest.importorskip("torch")

from tests.ranks import run_ranks
from tests.torch_gpt2.parallel.test_layouts import PIPELINE, TENSOR
from tests.torch_gpt2.parallel.test_quantized_layouts import averages, figures, job

pytestmark = pytest.mark.long

# products in another order, and so an activation that is rounded to the next of 15 levels now and
# then: 1.5e-5 was seen
TOLERANCE = 1e-4
SMALL: dict[str, Any] = {"model__num_layers": 2}  # its compiler takes seconds a layer
LAYOUTS = {
    "tp2": TENSOR | SMALL,
    "dp2": SMALL | {"train__micro_batch_size": 2},
    "pp2": PIPELINE | SMALL | {"parallel__pipeline_schedule": "1f1b"},
}


def on_mindspore(folder: Path, corpus: Path, name: str, **changes: Any) -> dict[str, Any]:
    settings = {"backend": "mindspore", "train__micro_batch_size": 4}
    return job(folder, corpus, name, "averages", **(settings | changes))


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    run_ranks(1, [job(folder, corpus_prefix, "torch", "averages", checkpoint__interval=2, **SMALL)])
    return folder / "torch" / "averages"


def equals(expected: Path, found: Path) -> None:
    own = figures(found)
    assert own == pytest.approx(figures(expected)[-len(own) :], rel=TOLERANCE)
    assert averages(found) == pytest.approx(averages(expected), rel=TOLERANCE)
    assert len(averages(found)) == 12


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.campaign) for name in ("tp2", "dp2", "pp2")]
)
def test_two_ranks_of_mindspore_equal_torch(
    torch_run: Path, tmp_path: Path, corpus_prefix: Path, layout: str
) -> None:
    run_ranks(2, [on_mindspore(tmp_path, corpus_prefix, layout, **LAYOUTS[layout])])
    assert len(figures(tmp_path / layout / "averages")) == 7
    equals(torch_run, tmp_path / layout / "averages")


def test_a_run_moves_between_the_frameworks(
    torch_run: Path, tmp_path: Path, corpus_prefix: Path
) -> None:
    second = torch_run / "checkpoints" / "step_00000002"
    changes = SMALL | {"checkpoint__resume": str(second)}
    run_ranks(1, [on_mindspore(tmp_path, corpus_prefix, "moved", **changes)])
    equals(torch_run, tmp_path / "moved" / "averages")

"""Quantization-aware training on MindSpore, on one rank and on two, equals torch's on one process;
a run moves between them.
"""

import tests.needs_both  # noqa: F401

# isort: split
from pathlib import Path
from typing import Any

import pytest

from tests.layouts import PIPELINE, TENSOR, TORCH, averages, figures
from tests.ranks import run_ranks
from tests.tiny import train_here

pytestmark = pytest.mark.long

# products in another order, and so an activation that is rounded to the next of 15 levels now and
# then: 1.5e-5 was seen
TOLERANCE = 1e-4
SMALL: dict[str, Any] = {"model__num_layers": 2}  # its compiler takes seconds a layer
LAYOUTS = {
    "tp2": TENSOR,
    "dp2": {"train__micro_batch_size": 2},
    "pp2": PIPELINE | {"parallel__pipeline_schedule": "1f1b"},
}


def job(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    return TORCH.job(folder, corpus, **TORCH.numerics["quantized"], **SMALL, **changes)


def on_mindspore(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    settings = {"backend": "mindspore", "train__micro_batch_size": 4}
    return job(folder, corpus, **(settings | changes))


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    return train_here(job(folder, corpus_prefix, checkpoint__interval=2))


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
    run_ranks(2, [on_mindspore(tmp_path, corpus_prefix, **LAYOUTS[layout])])
    assert len(figures(tmp_path)) == 7
    equals(torch_run, tmp_path)


def test_a_run_moves_between_the_frameworks(
    torch_run: Path, tmp_path: Path, corpus_prefix: Path
) -> None:
    second = torch_run / "checkpoints" / "step_00000002"
    train_here(on_mindspore(tmp_path, corpus_prefix, checkpoint__resume=str(second)))
    equals(torch_run, tmp_path)

"""Rewinds on MindSpore and on several ranks, beside torch's single process on data without the bad
batch; runs that move to another layout before and after their rewind.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.layouts import PIPELINE, SPLIT, TENSOR
from tests.ranks import run_ranks
from tests.tiny import rows_of, tiny_run
from tests.torch_gpt2.test_rewind import BAD_STEP, REWINDS, state, write_corpus

pytestmark = pytest.mark.campaign

MINDSPORE = {"backend": "mindspore"}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "MindSpore": (1, MINDSPORE),
    "MindSpore, two ranks": (2, MINDSPORE),
    "two ranks": (2, {}),
    "ZeRO 3": (2, SPLIT),
    "two stages": (2, PIPELINE),
    "tensor parallel": (2, TENSOR),
}
MOVES = [
    ("two ranks", "tensor parallel"),
    ("ZeRO 3", "MindSpore"),
    ("MindSpore, two ranks", "two stages"),
]


def run(folder: Path, way: str, *bad: int, **changes: Any) -> Path:
    ranks, layout = WAYS.get(way, (1, {}))
    corpus = folder.parent / "corpus"
    if not corpus.with_suffix(".bin").exists():
        write_corpus(corpus, *bad)
    keys = REWINDS | {"data__train": str(corpus), "train__micro_batch_size": 2} | layout | changes
    run_ranks(ranks, [tiny_run(folder, **keys)])
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("never") / "run", "one")


def require_no_trace(found: Path, expected: Path) -> None:
    """Adam's first updates amplify rounding where a gradient is near 0."""
    assert state(found)["rewinds"] == 1 and len(rows_of(found)) == 24
    for row, other in zip(rows_of(found), rows_of(expected), strict=True):
        for key in ("step", "loss", "grad_norm"):
            assert row[key] == pytest.approx(other[key], rel=1e-4), (row["step"], key)


@pytest.mark.parametrize("way", WAYS)
def test_equal_to_a_run_without_the_batch(way: str, tmp_path: Path, expected: Path) -> None:
    require_no_trace(run(tmp_path / "run", way, BAD_STEP), expected)


@pytest.mark.parametrize("stop", [BAD_STEP - 2, BAD_STEP + 3], ids=["before", "after"])
@pytest.mark.parametrize("move", MOVES, ids=", ".join)
def test_a_run_moves_before_and_after_its_rewind(
    move: tuple[str, str], stop: int, tmp_path: Path, expected: Path
) -> None:
    """Moved before it, the run goes back to a checkpoint of the other layout. Moved after it, the
    other layout must know which batch is left out, and find the samples of all others.
    """
    first = run(tmp_path / "run", move[0], BAD_STEP, train__max_steps=stop)
    assert state(first)["rewinds"] == (stop > BAD_STEP)
    begun = rows_of(first)
    require_no_trace(run(tmp_path / "run", move[1], BAD_STEP), expected)
    assert rows_of(first)[:10] == begun[:10], "it resumes, and does not start over"

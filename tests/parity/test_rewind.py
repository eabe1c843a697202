"""Rewinds on MindSpore and on several ranks, beside torch's single process on data without the bad
batch.
"""

from pathlib import Path

import pytest

from common.training.metrics import read_metrics
from tests.run_scripts import run_words, start_script
from tests.torch_gpt2.test_rewind import BAD_STEP, write_corpus

pytestmark = pytest.mark.campaign

CONFIG = "configs/gpt2/run_gpt2_tiny.yaml"
WAYS: dict[str, tuple[int, dict[str, object]]] = {
    "MindSpore": (1, {"backend": "mindspore"}),
    "MindSpore, two ranks": (2, {"backend": "mindspore"}),
    "two ranks": (2, {}),
    "ZeRO 3": (2, {"parallel__zero_stage": 3}),
    "two stages": (2, {"parallel__pipeline_stage": 2}),
    "tensor parallel": (2, {"parallel__model_parallel": 2}),
}


def run(folder: Path, corpus: Path, ranks: int, **keys: object) -> list[tuple[float, ...]]:
    keys = {
        "train__max_steps": 24,
        "train__micro_batch_size": 2,
        "train__global_batch_size": 4,
        "train__on_outlier": "rewind",
        "logging__outlier_deviations": 6,
        "logging__outlier_window": 16,
        "checkpoint__interval": 5,
        "optimizer__name": "adamw",
        "optimizer__learning_rate": 0.01,
        "optimizer__warmup_steps": 0,
        "optimizer__schedule": "constant",
        "data__split": "100,0,0",
        "data__shuffle": "false",
        "validation__interval": 0,
        "model__dropout": 0,
        **keys,
    }
    words = run_words(folder, corpus, **keys)
    log = folder.with_suffix(".log")
    process = start_script("none", CONFIG, f"[0,{ranks})", "train", *words, log=log)
    assert process.wait(timeout=500) == 0, log.read_text()
    return [
        (row["step"], row["loss"], row["grad_norm"])
        for row in read_metrics(folder / "metrics.jsonl")
        if "loss" in row
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    folder = tmp_path_factory.mktemp("never")
    return run(folder / "run", write_corpus(folder / "corpus"), 1)


@pytest.mark.parametrize("name", WAYS)
def test_equal_to_a_run_without_the_batch(
    name: str, tmp_path: Path, expected: list[tuple[float, ...]]
) -> None:
    ranks, keys = WAYS[name]
    found = run(tmp_path / "run", write_corpus(tmp_path / "corpus", BAD_STEP), ranks, **keys)
    assert "rewind 1 of 3" in (tmp_path / "run.log").read_text()
    assert len(found) == 24
    for row, other in zip(found, expected, strict=True):
        # Adam's first updates amplify rounding where a gradient is near 0
        assert row == pytest.approx(other, rel=1e-4)


MOVES: dict[str, tuple[str, str]] = {
    "two ranks, tensor parallel": ("two ranks", "tensor parallel"),
    "ZeRO 3, MindSpore": ("ZeRO 3", "MindSpore"),
    "MindSpore, two stages": ("MindSpore, two ranks", "two stages"),
}


@pytest.mark.parametrize("stop", [BAD_STEP - 2, BAD_STEP + 3], ids=["before", "after"])
@pytest.mark.parametrize("name", MOVES)
def test_a_run_moves_before_and_after_its_rewind(
    name: str, stop: int, tmp_path: Path, expected: list[tuple[float, ...]]
) -> None:
    """Moved before it, the run goes back to a checkpoint of the other layout. Moved after it, the
    other layout must know which batch is left out, and find the samples of all others.
    """
    corpus = write_corpus(tmp_path / "corpus", BAD_STEP)
    first, second = (WAYS[way] for way in MOVES[name])
    run(tmp_path / "run", corpus, first[0], **(first[1] | {"train__max_steps": stop}))
    rewound = "rewind 1 of 3" in (tmp_path / "run.log").read_text()
    assert rewound == (stop > BAD_STEP)
    found = run(tmp_path / "run", corpus, second[0], **second[1])
    text = (tmp_path / "run.log").read_text()
    assert "resuming" in text and text.count("rewind 1 of 3") == 1
    assert len(found) == 24
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4)

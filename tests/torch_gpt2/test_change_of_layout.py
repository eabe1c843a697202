"""A run that stops under one layout and goes on under another: the losses of one that was never stopped."""

from pathlib import Path
from typing import Any

import pytest

from common.training.checkpoint import find_checkpoint, read_manifest
from common.training.metrics import read_metrics
from tests.ranks import run_ranks
from tests.torch_gpt2.test_layouts import PIPELINE, SEQUENCE, SPLIT, TENSOR, tree

# float32 sums of the same terms in another order, for four steps; see test_layouts.py
TOLERANCE = 1e-6

SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 tp2 pp2": (8, TENSOR | PIPELINE),
    "zero3 on 4": (4, SPLIT),
    "zero3 tp2": (4, SEQUENCE | SPLIT),
}
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp4": (4, {"parallel__model_parallel": 4}),
    "pp2 dp2": (4, PIPELINE),
    "zero2 on 2": (2, {"parallel__zero_stage": 2}),
}
ADAMW: dict[str, Any] = {
    "train__global_batch_size": 8,
    "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1, "decay_steps": 8, "clip_grad": 1.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    """whole NAME: eight steps; NAME: four; NAME, OTHER: from there to step eight under another layout, or the same."""
    folder = tmp_path_factory.mktemp("changes")

    def run(ranks: int, runs: dict[str, dict[str, Any]], steps: int) -> None:
        jobs = [tree(folder / name, corpus_prefix, **settings, **ADAMW, train__max_steps=steps) for name, settings in runs.items()]
        run_ranks(ranks, jobs)

    for name, (ranks, settings) in SAVED.items():
        again = settings | {"checkpoint__resume": str(folder / name)}
        runs = [(f"whole {name}", settings, 8), (name, settings, 4), (f"{name}, same", again, 8)]
        jobs = [tree(folder / run, corpus_prefix, **changes, **ADAMW, train__max_steps=steps) for run, changes, steps in runs]
        run_ranks(ranks, jobs)
    for ranks in (1, 2, 4):
        again = {
            f"{saved}, {name}": settings | {"checkpoint__resume": str(folder / saved)}
            for name, (wanted, settings) in RESUMED.items()
            for saved in SAVED
            if wanted == ranks
        }
        run(ranks, again, 8)
    return folder


@pytest.mark.parametrize("resumed", ["same", *RESUMED])
@pytest.mark.parametrize("saved", list(SAVED))
def test_a_run_goes_on_under_another_layout(folder: Path, saved: str, resumed: str) -> None:
    """Against the run that was never stopped, under the layout of the checkpoint."""
    whole, later = (
        [row for row in read_metrics(folder / name / "metrics.jsonl") if "loss" in row]
        for name in (f"whole {saved}", f"{saved}, {resumed}")
    )
    assert [row["step"] for row in later] == [5, 6, 7, 8]
    assert [row["sample_hash"] for row in later] == [row["sample_hash"] for row in whole[4:]]
    for key in ("loss", "grad_norm"):
        expected = [row[key] if resumed == "same" else pytest.approx(row[key], rel=TOLERANCE) for row in whole[4:]]
        assert [row[key] for row in later] == expected, key


def test_each_rank_has_written_its_own_part(folder: Path) -> None:
    checkpoint = find_checkpoint(folder / "dp2 tp2 pp2")
    assert checkpoint is not None
    files = read_manifest(checkpoint)["files"]
    sizes = {name: record["bytes"] for name, record in files.items() if name.startswith("model")}
    assert len(sizes) == 8 and not list(checkpoint.glob("rank_*.json"))
    largest, whole = max(sizes.values()), sum(sizes.values())
    assert largest < 0.4 * whole, "four of eight ranks hold a quarter each; the copies hold nothing"


def test_a_part_that_is_missing_is_an_error(folder: Path, tmp_path: Path, corpus_prefix: Path) -> None:
    import json
    import shutil

    from common.config.load import build_config
    from common.config.resolve import resolve_config
    from common.errors import CheckpointError
    from torch_gpt2.train import train

    found = find_checkpoint(folder / "zero3 on 4")
    assert found is not None
    broken = tmp_path / "run" / "checkpoints" / found.name
    shutil.copytree(found, broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    del manifest["files"]["model.rank_00002.safetensors"]
    (broken / "manifest.json").write_text(json.dumps(manifest))
    config = resolve_config(build_config(tree(tmp_path / "again", corpus_prefix, **ADAMW, checkpoint__resume=str(broken))))
    with pytest.raises(CheckpointError, match=r"of .* only \d+ elements are there; use another checkpoint"):
        train(config)

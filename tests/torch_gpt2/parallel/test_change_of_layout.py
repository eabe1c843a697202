"""A run that stops under one layout and resumes under another: the losses of one that was never
stopped.
"""

import importlib.util
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import read_manifest, write_manifest
from common.config.load import build_config
from common.errors import CheckpointError
from common.inputs import make_run
from common.resolve.derive import resolve_config
from common.training.export import export
from common.training.metrics import read_metrics
from tests.ranks import run_ranks
from tests.torch_gpt2.parallel.test_layouts import PIPELINE, SEQUENCE, SPLIT, TENSOR, tree
from torch_gpt2.train import train

pytestmark = pytest.mark.long

# float32 sums of the same terms in another order, for four steps; see test_layouts.py
TOLERANCE = 1e-6

SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 tp2 pp2": (8, TENSOR | PIPELINE),
    "zero3 on 4": (4, SPLIT),
    "zero3 tp2": (4, SEQUENCE | SPLIT),
    "deepspeed zero2": (2, {"engine": "deepspeed", "parallel__zero_stage": 2}),
}
if importlib.util.find_spec("deepspeed") is None:
    del SAVED["deepspeed zero2"]
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp4": (4, {"parallel__model_parallel": 4}),
    "pp2 dp2": (4, PIPELINE),
    "zero3 on 2": (2, SPLIT),
}
IN_CAMPAIGN = {
    ("zero3 on 4", "tp4"),
    ("zero3 on 4", "zero3 on 2"),
    ("zero3 tp2", "one"),
    ("zero3 tp2", "pp2 dp2"),
    ("deepspeed zero2", "tp4"),
    ("deepspeed zero2", "pp2 dp2"),
}
"""Pairs whose two layouts the suite has in other pairs."""
PAIRS = [
    pytest.param(saved, resumed, marks=pytest.mark.campaign if pair in IN_CAMPAIGN else ())
    for pair in itertools.product(SAVED, ("same", *RESUMED))
    for saved, resumed in [pair]
]
ADAMW: dict[str, Any] = {
    "train__global_batch_size": 8,
    "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1, "decay_steps": 8, "clip_grad": 1.0},
}


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest
) -> Path:
    """whole NAME: eight steps; NAME: four; NAME, OTHER: from there to step eight under another
    layout, or the same; NAME, copied: read and written again by one process.
    """
    folder = tmp_path_factory.mktemp("changes")
    jobs = []
    campaign = any(
        item.path == request.path and item.get_closest_marker("campaign")
        for item in request.session.items
    )

    def add(
        name: str, layout: tuple[int, dict[str, Any]], steps: int, saved: str | None = None
    ) -> None:
        ranks, settings = layout
        resume = {"checkpoint__resume": str(folder / saved)} if saved else {}
        jobs.append(
            tree(
                folder / name,
                corpus_prefix,
                **settings,
                **ADAMW,
                **resume,
                train__max_steps=steps,
                ranks=ranks,
            )
        )

    for saved, layout in SAVED.items():
        add(f"whole {saved}", layout, 8)
        add(saved, layout, 4)
        add(f"{saved}, copied", RESUMED["one"], 4, saved)
        for name, other in {"same": layout, **RESUMED}.items():
            if campaign or (saved, name) not in IN_CAMPAIGN:
                add(f"{saved}, {name}", other, 8, saved)
    run_ranks(8, jobs)
    return folder


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_a_run_resumes_under_another_layout(folder: Path, saved: str, resumed: str) -> None:
    """Against the run that was never stopped, under the layout of the checkpoint."""
    whole, later = (
        [row for row in read_metrics(folder / name / "metrics.jsonl") if "loss" in row]
        for name in (f"whole {saved}", f"{saved}, {resumed}")
    )
    assert [row["step"] for row in later] == [5, 6, 7, 8]
    assert [row["sample_hash"] for row in later] == [row["sample_hash"] for row in whole[4:]]
    for key in ("loss", "grad_norm"):
        expected = [
            row[key] if resumed == "same" else pytest.approx(row[key], rel=TOLERANCE)
            for row in whole[4:]
        ]
        assert [row[key] for row in later] == expected, key


@pytest.mark.parametrize("saved", list(SAVED))
def test_an_export_is_the_file_that_one_process_writes(
    folder: Path, tmp_path: Path, saved: str
) -> None:
    """Byte for byte, whoever wrote the checkpoint and however many rows padded its vocabulary."""
    copied = find_checkpoint(folder / f"{saved}, copied")
    assert copied is not None
    words = tree(tmp_path, tmp_path, checkpoint__load=str(folder / saved))
    run, inputs = make_run(build_config(words), "export")
    assert inputs.checkpoint is not None
    export(run, inputs.checkpoint)
    assert (tmp_path / "weights" / "model.safetensors").read_bytes() == (
        copied / "model.safetensors"
    ).read_bytes()


def test_each_rank_has_written_its_own_part(folder: Path) -> None:
    checkpoint = find_checkpoint(folder / "dp2 tp2 pp2")
    assert checkpoint is not None
    files = read_manifest(checkpoint)["files"]
    sizes = {name: record["bytes"] for name, record in files.items() if name.startswith("model")}
    assert len(sizes) == 8 and not list(checkpoint.glob("rank_*.json"))
    largest, whole = max(sizes.values()), sum(sizes.values())
    assert largest < 0.4 * whole, "four of eight ranks hold a quarter each; the copies hold nothing"


def test_a_part_that_is_missing_is_an_error(
    folder: Path, tmp_path: Path, corpus_prefix: Path
) -> None:
    found = find_checkpoint(folder / "zero3 on 4")
    assert found is not None
    broken = tmp_path / "run" / "checkpoints" / found.name
    shutil.copytree(found, broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    del manifest["files"]["optimizer.rank_00002.safetensors"]
    write_manifest(broken, manifest)
    config = resolve_config(
        build_config(
            tree(tmp_path / "again", corpus_prefix, **ADAMW, checkpoint__resume=str(broken))
        )
    )
    message = (
        r"of wte\.weight\.exp_avg \[101, 32\] only \d+ elements are there; .* and \d+ more\."
        r" Use another checkpoint"
    )
    with pytest.raises(CheckpointError, match=message):
        train(*make_run(config))

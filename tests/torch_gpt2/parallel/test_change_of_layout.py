"""A run that stops under one layout, engine or size of batch and resumes under the same or another:
the results of one that was never stopped.
"""

import importlib.util
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from common.training.metrics import read_metrics
from tests.layouts import RECOMPUTE, SPLIT, TENSOR, THREE, TOLERANCE, TORCH, TORCH_NUMERICS, Layout
from tests.ranks import end_ranks, run_ranks, start_ranks
from tests.tiny import manifest_of, params_of, require_equal, require_same_bits, rows_of

pytestmark = pytest.mark.long

ADAMW: dict[str, Any] = {
    "train__global_batch_size": 8,
    "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1, "decay_steps": 8, "clip_grad": 1.0},
}
DROPS = {"model__dropout": 0.1}
RAMP = TORCH_NUMERICS["ramp"]
PLACES = TORCH.layouts | {
    "one": Layout(1, {}),
    "tp2 recomputed": Layout(2, TENSOR | THREE | RECOMPUTE),
    "zero3 on 2": Layout(2, SPLIT),
    "zero3 on 4": Layout(4, SPLIT),
}
CHANGES = ("one", "tp4", "dp2 pp2", "zero3 on 2")
SAVED: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "dp2 tp2 pp2": (ADAMW, CHANGES, ()),
    "zero3 on 4": (ADAMW, ("one", "dp2 pp2"), ("tp4", "zero3 on 2")),
    "zero3 tp2": (ADAMW, ("tp4", "zero3 on 2"), ("one", "dp2 pp2")),
    "deepspeed zero2": (ADAMW, ("one", "zero3 on 2"), ("tp4", "dp2 pp2")),
    "deepspeed zero3": (ADAMW | DROPS, (), ()),
    "deepspeed zero1 pp2": (ADAMW | DROPS | TORCH_NUMERICS["fp16 weights"], (), ()),
    "deepspeed tp2 pp2": (ADAMW, ("one",), ()),
    "zero3 on 2": (ADAMW, ("deepspeed zero1 pp2",), ()),
    # recomputed blocks must draw the masks of the forward pass
    "tp2": (ADAMW | DROPS, ("tp2 recomputed",), ()),
    "parameter server": (ADAMW, (), ()),
    "one": (RAMP, ("dp2",), ()),  # within the growth of the batch
    "dp2": (TORCH_NUMERICS["quantized"], (), ()),  # with the averages of activations
}
"""Numerics of a run; layouts that resume it, in the suite and only in the campaign.
All resume under their own too.
"""
UNSAVED = "zero3 tp2"
if importlib.util.find_spec("deepspeed") is None:
    SAVED = {name: each for name, each in SAVED.items() if not name.startswith("deepspeed")}
    SAVED["zero3 on 2"] = (ADAMW, (), ())
PAIRS = [
    pytest.param(saved, resumed, marks=pytest.mark.campaign if resumed in campaign else ())
    for saved, (_, suite, campaign) in SAVED.items()
    for resumed in ("same", *suite, *campaign)
]


def half_of(run: Path) -> Path:
    return run / "checkpoints" / "step_00000004"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest) -> Path:
    """NAME: eight steps; NAME, OTHER: from the fourth to the eighth under another layout, or the
    same; NAME, unsaved: eight steps that are saved at their end only.
    """
    folder = tmp_path_factory.mktemp("changes")
    jobs = []

    def add(name: str, place: str, numerics: dict[str, Any], steps: int, saved: str = "", every: int = 4) -> None:
        resume = {"checkpoint__resume": str(half_of(folder / saved))} if saved else {}
        changes = numerics | PLACES[place].settings | resume | {"ranks": PLACES[place].ranks}
        changes |= {"train__max_steps": steps, "checkpoint__interval": every}
        jobs.append(TORCH.job(folder / name, corpus_prefix, **changes))

    chosen = params_of(request, "saved", "resumed")
    for saved, (numerics, suite, campaign) in SAVED.items():
        add(saved, saved, numerics, 8)
        for name in ("same", *suite, *campaign):
            if (saved, name) in chosen:
                place = saved if name == "same" else name
                add(f"{saved}, {name}", place, numerics, 8, saved)
    add(f"{UNSAVED}, unsaved", UNSAVED, ADAMW, 8, every=8)
    run_ranks(8, jobs, seconds=4.0)
    return folder


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_a_run_resumes_under_another_layout(folder: Path, saved: str, resumed: str) -> None:
    """Against the run that was never stopped, under the layout of the checkpoint."""
    whole, later = folder / saved, folder / f"{saved}, {resumed}"
    assert [row["step"] for row in rows_of(later)] == [5, 6, 7, 8]
    tolerance = 0.0 if resumed == "same" else TOLERANCE
    require_equal(later, whole, tolerance, last=len(read_metrics(later / "metrics.jsonl")))
    if resumed == "same":
        require_same_bits(later, whole, last=4)


def test_a_save_does_not_change_the_run(folder: Path) -> None:
    require_same_bits(folder / UNSAVED, folder / f"{UNSAVED}, unsaved", last=8)


def test_each_rank_has_written_its_own_part(folder: Path) -> None:
    """Four of eight ranks hold a quarter each; the copies hold nothing."""
    files = manifest_of(folder / "dp2 tp2 pp2")["files"].items()
    sizes = [record["bytes"] for name, record in files if name.startswith("model")]
    assert len(sizes) == 8 and max(sizes) < 0.4 * sum(sizes)


def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_resumes_bit_for_bit(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    """Three ranks, since two would sum alike in any order; dropout, since each rank draws masks of
    its own.
    """
    settings = DROPS | {"model__num_layers": 1, "train__max_steps": 60, "checkpoint__interval": 25}
    folders = tmp_path / "whole", tmp_path / "halves"
    whole, halves = (TORCH.job(each, corpus_prefix, **settings) for each in folders)
    processes = start_ranks(3, [halves])
    metrics = tmp_path / "halves" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not metrics.exists() or not metrics.read_text():
        assert time.monotonic() < end and processes[0].poll() is None
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGTERM)
    codes, printed = end_ranks(processes)
    assert codes == [128 + signal.SIGTERM] * 3, printed
    assert len({text.rpartition("error: ")[2] for text in printed}) == 1, "all name the same step"
    begun = read_metrics(metrics)
    assert 0 < begun[-1]["step"] < 60
    run_ranks(3, [whole, halves])
    assert read_metrics(metrics)[: len(begun)] == begun, "it resumes, and does not start over"
    require_same_bits(tmp_path / "halves", tmp_path / "whole")


def test_ranks_that_would_train_different_things_refuse(tmp_path: Path, corpus_prefix: Path) -> None:
    ours, theirs = (TORCH.job(tmp_path / "run", corpus_prefix, optimizer__learning_rate=rate) for rate in (0.3, 0.2))
    codes, printed = end_ranks(start_ranks(2, [ours], other={1: [theirs]}))
    assert codes == [2, 2]
    for text in printed:
        assert "rank 1 differs from rank 0 in optimizer.learning_rate: 0.2 and 0.3" in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

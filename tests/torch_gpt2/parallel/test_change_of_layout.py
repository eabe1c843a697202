"""A run that stops and resumes under another layout, engine or size of batch equals one that never stopped."""

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
SAVED: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "dp2 tp2 pp2": (ADAMW, ("one",), ("tp4", "dp2 pp2", "zero3 on 2")),
    "zero3 on 4": (ADAMW, ("dp2 pp2",), ("one", "tp4", "zero3 on 2")),
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
"""Numerics of a run; layouts that resume it, in the suite and only in the campaign. All resume under their own too."""
if importlib.util.find_spec("deepspeed") is None:
    SAVED = {name: each for name, each in SAVED.items() if not name.startswith("deepspeed")}
    SAVED["zero3 on 2"] = (ADAMW, (), ())
PAIRS = [
    pytest.param(saved, resumed, marks=pytest.mark.campaign if resumed in campaign else ())
    for saved, (_, suite, campaign) in SAVED.items()
    for resumed in ("same", *suite, *campaign)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path, request: pytest.FixtureRequest) -> Path:
    """NAME: eight steps; NAME, OTHER: from the fourth to the eighth under another layout, or the same."""
    folder, jobs = tmp_path_factory.mktemp("changes"), []

    def add(name: str, place: str, numerics: dict[str, Any], **more: Any) -> None:
        changes = numerics | PLACES[place].settings | {"ranks": PLACES[place].ranks} | more
        changes |= {"train__max_steps": 8, "checkpoint__interval": 4}
        jobs.append(TORCH.job(folder / name, corpus_prefix, **changes))

    chosen = params_of(request, "saved", "resumed")
    for saved in dict.fromkeys(saved for saved, _ in chosen):
        add(saved, saved, SAVED[saved][0])
    for saved, resumed in chosen:
        half = folder / saved / "checkpoints" / "step_00000004"
        place = saved if resumed == "same" else resumed
        add(f"{saved}, {resumed}", place, SAVED[saved][0], checkpoint__resume=str(half))
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


@pytest.mark.parametrize(("saved", "resumed"), [("dp2 tp2 pp2", "same")])
def test_each_rank_has_written_its_own_part(folder: Path, saved: str, resumed: str) -> None:
    """Four of eight ranks hold a quarter each; the copies hold nothing."""
    files = manifest_of(folder / saved)["files"].items()
    sizes = [record["bytes"] for name, record in files if name.startswith("model")]
    assert len(sizes) == 8 and max(sizes) < 0.4 * sum(sizes)


def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_resumes_bit_for_bit(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    """Three ranks, since two would sum alike in any order; dropout, since each rank draws masks of its own."""
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

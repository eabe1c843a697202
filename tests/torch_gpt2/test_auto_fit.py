"""train.micro_batch_size=auto and train.recompute=auto: the choice of the plan, in runs."""

import json
from pathlib import Path
from typing import Any

import pytest

import torch_gpt2.train
from common.config.load import build_config
from common.config.schema import RunConfig
from common.inputs import make_run
from common.parallel.run import Run
from common.planner import room
from common.planner.fitting import Fitting
from common.planner.memory import memory_of
from common.resolve.derive import resolve_other
from common.run_config import load_config
from tests.ranks import run_ranks
from tests.tiny import require_equal, rows_of
from tests.torch_gpt2.test_ramp import make_tree

AUTO: dict[str, Any] = {
    "train__max_steps": 3,
    "train__micro_batch_size": "auto",
    "train__rampup_batch_size": None,
}


def written(**changes: Any) -> RunConfig:
    return build_config(make_tree(Path("run"), Path("data"), **{**AUTO, **changes}))


def search(world_size: int = 1, limit: float | None = None, **changes: Any) -> Fitting:
    return Fitting(written(**changes), world_size, None, limit)


def peak(size: int, **changes: Any) -> int:
    run = resolve_other(written(**changes), world_size=1, train={"micro_batch_size": size})
    return max(memory_of(run, at).peak for at in range(run.topology.pipeline))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give this machine so many bytes beyond the reserve."""

    def give(bytes_for_runs: float) -> None:
        there = int(bytes_for_runs / (1 - room.RESERVED)) + 1
        monkeypatch.setattr(room, "machine_memory", lambda: there)

    return give


@pytest.mark.parametrize(
    ("world_size", "changes", "wanted"),
    [
        (1, {}, [1, 2, 3, 4, 6, 12]),
        (2, {}, [1, 2, 3, 6]),
        (2, {"parallel__pipeline_stage": 2}, [1, 2, 3, 4, 6]),
        (2, {"parallel__pipeline_stage": 2, "train__global_batch_size": 1}, [1]),
        (1, {"train__rampup_batch_size": [4, 4, 24]}, [1, 2, 4]),
        (2, {"train__rampup_batch_size": [4, 4, 24]}, [1, 2]),
        (1, {"engine": "deepspeed"}, [1, 2, 3, 4, 6, 12]),
        (1, {"backend": "mindspore"}, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_the_choices_divide_every_batch_and_keep_a_pipeline_busy(
    monkeypatch: pytest.MonkeyPatch, world_size: int, changes: dict[str, Any], wanted: list[int]
) -> None:
    tried: list[Run] = []
    monkeypatch.setattr(Fitting, "fits", lambda self, run: tried.append(run))
    search(world_size, **changes).largest()
    assert [run.train.micro_batch_size for run in reversed(tried)] == wanted


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_the_plan_takes_the_largest_one_within_the_limit(backend: str) -> None:
    peaks = {size: peak(size, backend=backend) for size in (1, 2, 3, 4, 6, 12)}
    limits = {1.0: 1, None: 1} | {need: size for size, need in peaks.items()}
    limits |= {peaks[12] - 1: 6, peaks[2] - 1: 1}
    for limit, size in limits.items():
        found = search(limit=limit, backend=backend).fastest()
        assert found.train.micro_batch_size == found.validation.micro_batch_size == size


def train(folder: Path, corpus: Path, **changes: Any) -> Any:
    """Train, and return the section train that the run folder holds."""
    keys = {**AUTO, "optimizer__decay_steps": 6, **changes}
    torch_gpt2.train.train(*make_run(build_config(make_tree(folder, corpus, **keys))))
    return load_config(folder / "config.yaml").train


def test_a_run_takes_the_choice_for_the_memory_that_is_there(
    memory: Any, corpus_prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses and norms equal those of another micro batch: float32 sums in another order, 1e-6."""
    memory(peak(4))
    found = train(tmp_path / "auto", corpus_prefix)
    assert (found.micro_batch_size, found.accumulation_steps, found.global_batch_size) == (4, 3, 12)
    assert load_config(tmp_path / "auto" / "config.yaml").validation.micro_batch_size == 4
    measured = json.loads((tmp_path / "auto" / "memory.json").read_text())
    steps = [row["step_time"] for row in rows_of(tmp_path / "auto")]
    assert min(steps) <= measured["step_seconds"] <= max(steps) and measured["name"]
    memory(peak(12))
    assert train(tmp_path / "auto", corpus_prefix, train__max_steps=6).micro_batch_size == 12
    train(tmp_path / "one", corpus_prefix, train__max_steps=6, train__micro_batch_size=1)
    for key in ("loss", "grad_norm"):
        auto, one = ([row[key] for row in rows_of(tmp_path / name)] for name in ("auto", "one"))
        assert auto == [pytest.approx(value, rel=1e-6) for value in one]


def test_a_run_recomputes_what_it_must(memory: Any, corpus_prefix: Path, tmp_path: Path) -> None:
    """The losses are those of a run that recomputes nothing, bit for bit."""
    big: dict[str, Any] = {"train__micro_batch_size": 12, "train__recompute": "auto"}
    memory(peak(12) - 1)
    found = train(tmp_path / "auto", corpus_prefix, **big)
    chosen = found.recompute, found.recompute_layers, found.micro_batch_size
    assert chosen == ("selective", 1, 12)
    memory(2 * peak(12))
    assert train(tmp_path / "none", corpus_prefix, **big).recompute == "none"
    for key in ("loss", "grad_norm"):
        auto, none = ([row[key] for row in rows_of(tmp_path / name)] for name in ("auto", "none"))
        assert auto == none and len(auto) == 3


@pytest.mark.long
def test_two_ranks_take_the_same_one(corpus_prefix: Path, tmp_path: Path) -> None:
    """Six samples a rank at once: losses of one process with micro batches of two within 1e-6."""
    runs = {
        "one": {"train__micro_batch_size": 2, "ranks": 1},
        "auto": {},
        "pipeline": {"parallel__pipeline_stage": 2},
    }
    jobs = [make_tree(tmp_path / name, corpus_prefix, **AUTO | each) for name, each in runs.items()]
    run_ranks(2, jobs)
    for name in ("auto", "pipeline"):
        assert load_config(tmp_path / name / "config.yaml").train.micro_batch_size == 6
        require_equal(tmp_path / name, tmp_path / "one", 1e-6)

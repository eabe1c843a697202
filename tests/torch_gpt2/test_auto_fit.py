"""train.micro_batch_size=auto and train.recompute=auto: choice by the plan, trial on a device,
resume that keeps it.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_gpt2.train
from common.cluster.environment import ALONE
from common.config.load import build_config
from common.errors import ConfigError
from common.parallel.resolved_run import ResolvedRun
from common.parallel.world import WorldBase
from common.planner import fitting
from common.planner.memory import memory_of
from common.resolve.derive import resolve_config, resolve_length, with_micro_batch
from common.run_config import load_config
from common.training.auto_fit import settle_auto
from tests.ranks import run_ranks
from tests.torch_gpt2.test_ramp import make_tree, require_equal, rows_of
from torch_gpt2.device import select_device
from torch_gpt2.engine import Engine
from torch_gpt2.trial import fits, make_trial

AUTO: dict[str, Any] = {
    "train__max_steps": 3,
    "train__micro_batch_size": "auto",
    "train__rampup_batch_size": None,
}


def make_config(world_size: int = 1, **changes: Any) -> ResolvedRun:
    tree = make_tree(Path("run"), Path("data"), **{**AUTO, **changes})
    return resolve_config(build_config(tree), world_size=world_size)


def peak(config: ResolvedRun, size: int) -> int:
    tried = with_micro_batch(config, size)
    stages = range(tried.topology.pipeline)
    return max(memory_of(tried, tried.topology, place).peak for place in stages)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give this machine so many bytes beyond the reserve."""

    def give(bytes_for_runs: float) -> None:
        there = int(bytes_for_runs / (1 - fitting.RESERVED)) + 1
        monkeypatch.setattr(fitting, "machine_memory", lambda: there)

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
    world_size: int, changes: dict[str, Any], wanted: list[int]
) -> None:
    config = make_config(world_size, **changes)
    assert config.train.micro_batch_size == 1 and config.train.micro_batch_is_auto
    assert fitting.choices(config) == wanted


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_the_plan_takes_the_largest_one_within_the_limit(backend: str) -> None:
    config = make_config(backend=backend)
    sizes = fitting.choices(config)
    peaks = [peak(config, size) for size in sizes]
    assert peaks == sorted(set(peaks))
    for size, bytes_needed in zip(sizes, peaks, strict=True):
        assert fitting.largest_by_plan(config, bytes_needed) == size
    for smaller, bytes_needed in zip(sizes, peaks[1:], strict=False):
        assert fitting.largest_by_plan(config, bytes_needed - 1) == smaller
    assert fitting.largest_by_plan(config, 1) == 1
    assert fitting.largest_by_plan(config, None) == 12


def test_ranks_share_the_memory_of_a_cpu(memory: Any) -> None:
    memory(1000)
    config = make_config()
    one, four = (
        fitting.rank_memory(config, kind="cpu", device_memory=None, ranks=ranks) for ranks in (1, 4)
    )
    assert one is not None and one == pytest.approx(1000, abs=2) and four == one / 4
    device = fitting.rank_memory(config, kind="cuda", device_memory=100, ranks=4)
    assert device == 100 * (1 - fitting.RESERVED)


def test_a_run_takes_it_and_a_resume_keeps_it(
    memory: Any,
    corpus_prefix: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Losses and norms equal those of another micro batch: float32 sums in another order, 1e-6."""

    def run(name: str, steps: int = 3, **changes: Any) -> Path:
        keys = {**AUTO, "train__max_steps": steps, "optimizer__decay_steps": 6, **changes}
        tree = make_tree(tmp_path / name, corpus_prefix, **keys)
        torch_gpt2.train.train(resolve_config(build_config(tree)))
        return tmp_path / name

    memory(peak(make_config(), 4))
    folder = run("auto")
    train = load_config(folder / "config.yaml").train
    assert (train.micro_batch_size, train.accumulation_steps, train.global_batch_size) == (4, 3, 12)
    assert load_config(folder / "config.yaml").validation.micro_batch_size == 4
    memory(peak(make_config(), 12))
    run("auto", steps=6)
    assert load_config(folder / "config.yaml").train.micro_batch_size == 4
    one = run("one", steps=6, train__micro_batch_size=1)
    for key in ("loss", "grad_norm"):
        found, wanted = ([row[key] for row in rows_of(each)] for each in (folder, one))
        assert found == [pytest.approx(value, rel=1e-6) for value in wanted]
    # with another global batch the choice is made again, by the memory that is there now
    run("auto", steps=7, train__global_batch_size=6)
    assert load_config(folder / "config.yaml").train.micro_batch_size == 6


def test_a_trial_that_runs_out_of_memory_halves_it(
    memory: Any, corpus_prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has room for three samples, and the plan says twelve: 12, 6, 3."""
    tried = []
    accumulate = Engine._accumulate_gradients

    def limited(self: Engine, tokens: Any, scale: Any) -> torch.Tensor:
        tried.append((self.config.train.micro_batch_size, len(tokens)))
        if self.config.train.micro_batch_size > 3:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
        return accumulate(self, tokens, scale)

    monkeypatch.setattr(Engine, "_accumulate_gradients", limited)
    monkeypatch.setattr(
        torch_gpt2.train, "make_trial", lambda config, device: partial(fits, device=device)
    )
    memory(2**40)
    tree = make_tree(tmp_path / "run", corpus_prefix, **AUTO)
    torch_gpt2.train.train(resolve_config(build_config(tree)))
    # two trial steps of two micro batches, then the run's own of twelve samples
    assert tried == [(12, 12), (6, 12), (3, 6), (3, 6), (3, 12), (3, 12), (3, 12)]
    assert load_config(tmp_path / "run" / "config.yaml").train.micro_batch_size == 3


def test_other_errors_of_a_trial_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine, tokens: Any, scale: Any) -> torch.Tensor:
        raise RuntimeError("a kernel is missing")

    monkeypatch.setattr(Engine, "_accumulate_gradients", broken)
    config = with_micro_batch(resolve_length(make_config(), 100), 2)
    with pytest.raises(RuntimeError, match="a kernel is missing"):
        fits(config, select_device("cpu"))


def test_only_whole_models_on_accelerators_are_tried() -> None:
    cpu = select_device("cpu")
    assert make_trial(make_config(), cpu) is None
    npu = type(cpu)(kind="npu", index=0, name="npu", module=None)
    assert make_trial(make_config(), npu) is not None
    assert make_trial(make_config(engine="deepspeed"), npu) is None
    for key in ("model_parallel", "pipeline_stage"):
        assert make_trial(make_config(2, **{f"parallel__{key}": 2}), npu) is None
    assert make_trial(make_config(2, parallel__zero_stage=2), npu) is None


@dataclass(frozen=True, kw_only=True)
class Beside(WorldBase):
    """This rank beside one that gives the answers of ``other`` in turn."""

    other: list[Any] = field(default_factory=list)
    size: int = 2

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other.pop(0)]


@dataclass(frozen=True, kw_only=True)
class Alone(WorldBase):
    size: int = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_ranks_agree_on_the_smallest_one(memory: Any, tmp_path: Path) -> None:
    """The other rank has room for 6 by its plan, and its trial of 6 fails."""
    memory(2**40)
    config = resolve_length(make_config(output_dir=str(tmp_path)), 100)
    world = Beside(other=[None, (1.0, (6, "none", None)), False, True])
    asked = []

    def trial(run: Any) -> bool:
        asked.append(run.train.micro_batch_size)
        return True

    data: Any = object()
    found = settle_auto(
        (data, config), world, ALONE, select_device("cpu"), lambda run: (data, run), trial
    )
    assert found[1].train.micro_batch_size == 3 and asked == [6, 3] and not world.other
    with pytest.raises(ConfigError, match=r"a step with 1 samples .* is out of memory; "):
        settle_auto(
            (data, config), Beside(other=[None, (1.0, (1, "none", None)), False]), ALONE,
            select_device("cpu"), lambda run: (data, run), trial,
        )  # fmt: skip


BIG: dict[str, Any] = {**AUTO, "train__micro_batch_size": 12, "train__recompute": "auto"}
"""A run that leaves only recomputation open."""


def test_a_run_recomputes_what_it_must_and_a_resume_keeps_it(
    memory: Any, corpus_prefix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The losses are those of a run that recomputes nothing, bit for bit."""

    def run(name: str, steps: int, **changes: Any) -> Any:
        keys = {**BIG, "train__max_steps": steps, "optimizer__decay_steps": 6, **changes}
        tree = make_tree(tmp_path / name, corpus_prefix, **keys)
        torch_gpt2.train.train(resolve_config(build_config(tree)))
        return load_config(tmp_path / name / "config.yaml").train

    whole = peak(make_config(**BIG), 12)
    memory(whole - 1)
    train = run("auto", 3)
    chosen = train.recompute, train.recompute_layers
    assert chosen == ("selective", 1) and train.micro_batch_size == 12
    memory(2 * whole)
    train = run("auto", 6)
    assert (train.recompute, train.recompute_layers) == chosen
    assert run("none", 6).recompute == "none"
    for key in ("loss", "grad_norm"):
        found, wanted = (
            [row[key] for row in rows_of(tmp_path / name)] for name in ("auto", "none")
        )
        assert found == wanted and len(found) == 6


@pytest.mark.parametrize(
    ("changes", "passing", "tried"),
    [
        (
            {"train__micro_batch_size": 12},
            ("full", None, 12),
            [("none", 12), ("selective", 12), ("full", 12)],
        ),
        (
            {"train__micro_batch_size": "auto"},
            ("selective", None, 1),
            [("none", 12), ("none", 6), ("none", 3), ("none", 1), ("selective", 1)],
        ),
    ],
)
def test_a_trial_halves_the_micro_batch_then_recomputes_more(
    memory: Any, tmp_path: Path, changes: dict[str, Any], passing: Any, tried: Any
) -> None:
    memory(2**40)
    config = resolve_length(make_config(**{**BIG, **changes, "output_dir": str(tmp_path)}), 100)
    asked = []

    def trial(run: Any) -> bool:
        train = run.train
        asked.append((train.recompute, train.micro_batch_size))
        return (train.recompute, train.recompute_layers, train.micro_batch_size) == passing

    data: Any = object()
    found = settle_auto(
        (data, config), Alone(), ALONE, select_device("cpu"), lambda run: (data, run), trial
    )
    assert asked == tried
    assert not (found[1].train.micro_batch_is_auto or found[1].train.recompute_is_auto)
    with pytest.raises(ConfigError, match=r"recompute=full, the least possible, is out of memory"):
        settle_auto(
            (data, config), Alone(), ALONE, select_device("cpu"), lambda run: (data, run),
            lambda run: False,
        )  # fmt: skip


def test_the_rank_with_the_least_memory_chooses(memory: Any, tmp_path: Path) -> None:
    """A larger micro batch with recomputation may need less than a smaller one without."""
    memory(2**40)
    config = resolve_length(make_config(**BIG, output_dir=str(tmp_path)), 100)
    data: Any = object()
    found = settle_auto(
        (data, config), Beside(other=[None, (2.0**50, (1, "full", None))]), ALONE,
        select_device("cpu"), lambda run: (data, run),
    )  # fmt: skip
    assert found[1].train.recompute == "none"
    for other in (("selective", 1), ("selective", None), ("full", 2)):
        found = settle_auto(
            (data, config), Beside(other=[None, (1.0, (12, *other))]), ALONE, select_device("cpu"),
            lambda run: (data, run),
        )  # fmt: skip
        train = found[1].train
        assert (train.recompute, train.recompute_layers) == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__global_batch_size": None}, "auto divides train.global_batch_size, found None"),
        ({"train__accumulation_steps": 3}, "gives train.accumulation_steps, found 3"),
        ({"train__global_batch_size": 13, "world_size": 2}, "13 is not a multiple"),
        ({"train__micro_batch_size": "most"}, "micro_batch_size"),
        (
            {"train__recompute": "auto", "train__recompute_layers": 1},
            "auto chooses train.recompute_layers too, found 1",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    world_size = changes.pop("world_size", 1)
    with pytest.raises(ConfigError, match=message):
        make_config(world_size, **changes)


@pytest.mark.long
def test_two_ranks_take_the_same_one(corpus_prefix: Path, tmp_path: Path) -> None:
    """Six samples a rank at once: losses of one process with micro batches of two within 1e-6."""
    require_two_ranks_equal_one(tmp_path, corpus_prefix, "torch", 1e-6)


def require_two_ranks_equal_one(folder: Path, corpus: Path, backend: str, bound: float) -> None:
    def job(name: str, **changes: Any) -> dict[str, Any]:
        return make_tree(folder / name, corpus, **{**AUTO, "backend": backend, **changes})

    run_ranks(1, [job("one", train__micro_batch_size=2)])
    run_ranks(2, [job("auto"), job("pipeline", parallel__pipeline_stage=2)])
    for name, size in (("auto", 6), ("pipeline", 6)):
        assert load_config(folder / name / "config.yaml").train.micro_batch_size == size
        require_equal(folder / name, folder / "one", bound)

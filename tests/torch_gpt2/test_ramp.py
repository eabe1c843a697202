"""Runs whose batch grows, beside a plain loop over the same samples. train.micro_batch_size=auto
and train.recompute=auto: the choice of the plan, in runs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config.load import build_config
from common.config.schema import RunConfig
from common.dataset.blend import open_samples
from common.parallel.run import Run
from common.planner import fitting
from common.planner.fitting import Fitting
from common.planner.memory import memory_of
from common.resolve.derive import resolve_config, resolve_other
from common.run_config import load_config
from common.training.start import Start
from tests.layouts import TORCH_NUMERICS
from tests.ranks import run_ranks
from tests.tiny import SGD, require_equal, require_same_bits, rows_of, tiny_run, train_here
from torch_gpt2.device import select_device
from torch_gpt2.engine import Engine
from torch_gpt2.model import GPT2

RAMP = TORCH_NUMERICS["ramp"]["train__rampup_batch_size"]
SIZES = [4, 4, 4, 8, 8, 12, 12, 12]
"""By hand: 8 samples for each of three increments, and the full batch beyond 24."""
STEPS = [[0, 4], [12, 8], [25, 12]]
"""Sizes of RAMP by their first samples."""
BY_SAMPLES: dict[str, Any] = {"optimizer__warmup_steps": None}
BY_SAMPLES |= {"optimizer__warmup_samples": 16, "optimizer__decay_samples": 64}


def make_tree(folder: Path, corpus: Path, **changes: Any) -> dict[str, Any]:
    small = {"num_layers": 4, "hidden_size": 16, "num_heads": 2, "initializer_range": 0.1}
    ramp: dict[str, Any] = {f"model__{key}": value for key, value in small.items()}
    ramp |= {"train__max_steps": 8, "train__global_batch_size": 12, "train__rampup_batch_size": RAMP}
    ramp["optimizer"] = SGD | {"learning_rate": 0.05, "schedule": "cosine", "warmup_steps": 4}
    ramp["validation"] = {"interval": 0, "max_samples": 4}
    return tiny_run(folder, corpus, **(ramp | changes))


@pytest.fixture
def start(corpus_prefix: Path, tmp_path: Path) -> Any:
    def run(name: str, **changes: Any) -> Path:
        return train_here(make_tree(tmp_path / name, corpus_prefix, **changes))

    return run


@pytest.mark.parametrize("ramp", [RAMP, STEPS], ids=str)
def test_a_run_equals_a_plain_loop(ramp: Any, start: Any, corpus_prefix: Path, tmp_path: Path) -> None:
    """float32 sums of micro batches in another order: 1e-6."""
    changes = {"train__rampup_batch_size": ramp, **BY_SAMPLES}
    rows = rows_of(start("run", logging__style="megatron", **changes))
    assert [row["global_batch_size"] for row in rows] == SIZES
    assert [row["consumed_samples"] for row in rows] == np.cumsum(SIZES).tolist()
    before = np.cumsum([0, *SIZES[:-1]])  # 0 4 8 12 20 28 40 52: the schedule counts samples
    down = 0.5 + 0.5 * np.cos(np.pi * (before - 16) / 48)
    expected = 0.05 * np.where(before <= 16, before / 16, down)
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected.tolist())

    config = resolve_config(build_config(make_tree(tmp_path / "loop", corpus_prefix)), samples_per_epoch=1000)
    samples = open_samples(
        [str(corpus_prefix)], split="train", split_weights=(90.0, 10.0, 0.0), seq_length=16,
        seed=config.seed, shuffle=config.data.shuffle,
    )  # fmt: skip
    engine = Engine(config, select_device("cpu"))
    engine.begin(Start())
    model = GPT2(config.model, config.precision, config.vocab_rows)
    model.load_state_dict(engine.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    first = 0
    for row, size in zip(rows, SIZES, strict=True):
        tokens = torch.from_numpy(samples.read(np.arange(first, first + size)).astype(np.int64))
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = row["learning_rate"]
        loss = model.loss_sum(tokens[:, :-1], tokens[:, 1:]) / (size * 16)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        first += size


def test_lengths_count_the_growing_batches(start: Any, tmp_path: Path, corpus_prefix: Path) -> None:
    """64 samples end with step 8; the ninth would end with sample 76."""

    def steps(samples: int, **length: Any) -> int:
        tree = make_tree(tmp_path, corpus_prefix, train__max_steps=None, **length)
        return resolve_config(build_config(tree), samples_per_epoch=samples).train.steps

    assert steps(32, train__max_epochs=2) == 8
    assert steps(38, train__max_epochs=2) == 9
    assert steps(1000, train__max_tokens=64 * 16 + 15) == 8


AUTO: dict[str, Any] = {"train__max_steps": 3, "train__micro_batch_size": "auto"}
AUTO |= {"train__rampup_batch_size": None, "optimizer__decay_steps": 6}


def written(**changes: Any) -> RunConfig:
    return build_config(make_tree(Path("run"), Path("data"), **{**AUTO, **changes}))


def peak(size: int, **changes: Any) -> int:
    run = resolve_other(written(**changes), world_size=1, train={"micro_batch_size": size})
    return max(memory_of(run, at).peak for at in range(run.topology.pipeline))


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
        (2, {}, [1, 2, 3, 6]),
        (2, {"parallel__pipeline_stage": 2}, [1, 2, 3, 4, 6]),
        (2, {"parallel__pipeline_stage": 2, "train__global_batch_size": 1}, [1]),
        (1, {"train__rampup_batch_size": [4, 4, 24]}, [1, 2, 4]),
        (1, {"backend": "mindspore"}, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_the_choices_divide_every_batch_and_keep_a_pipeline_busy(
    monkeypatch: pytest.MonkeyPatch, world_size: int, changes: dict[str, Any], wanted: list[int]
) -> None:
    tried: list[Run] = []
    monkeypatch.setattr(Fitting, "fits", lambda self, run: tried.append(run))
    Fitting(written(**changes), world_size, None, None).largest()
    assert [run.train.micro_batch_size for run in reversed(tried)] == wanted


def test_a_run_takes_the_choice_for_the_memory_that_is_there(memory: Any, start: Any) -> None:
    """Losses and norms equal those of another micro batch: float32 sums in another order, 1e-6."""
    memory(peak(4))
    run = start("auto", **AUTO)
    config, measured = (load_config(run / "config.yaml"), json.loads((run / "memory.json").read_text()))
    found = config.train
    assert (found.micro_batch_size, found.accumulation_steps, found.global_batch_size) == (4, 3, 12)
    assert config.validation.micro_batch_size == 4
    steps = [row["step_time"] for row in rows_of(run)]
    assert min(steps) <= measured["step_seconds"] <= max(steps) and measured["name"]
    memory(peak(12))
    start("auto", **AUTO | {"train__max_steps": 6})
    assert load_config(run / "config.yaml").train.micro_batch_size == 12
    one = start("one", **AUTO | {"train__max_steps": 6, "train__micro_batch_size": 1})
    for key in ("loss", "grad_norm"):
        auto, wanted = ([row[key] for row in rows_of(each)] for each in (run, one))
        assert auto == pytest.approx(wanted, rel=1e-6)


def test_a_run_recomputes_what_it_must(memory: Any, start: Any) -> None:
    """The losses are those of a run that recomputes nothing, bit for bit."""
    big = AUTO | {"train__micro_batch_size": 12, "train__recompute": "auto"}
    memory(peak(12) - 1)
    run = start("auto", **big)
    found = load_config(run / "config.yaml").train
    assert (found.recompute, found.recompute_layers, found.micro_batch_size) == ("selective", 1, 12)
    memory(2 * peak(12))
    none = start("none", **big)
    assert load_config(none / "config.yaml").train.recompute == "none"
    require_same_bits(run, none)


@pytest.mark.long
def test_two_ranks_take_the_same_one(corpus_prefix: Path, tmp_path: Path) -> None:
    """Six samples a rank at once: losses of one process with micro batches of two within 1e-6."""
    runs = {"one": {"train__micro_batch_size": 2, "ranks": 1}, "auto": {}, "pipeline": {"parallel__pipeline_stage": 2}}
    jobs = [make_tree(tmp_path / name, corpus_prefix, **AUTO | each) for name, each in runs.items()]
    run_ranks(2, jobs)
    for name in ("auto", "pipeline"):
        assert load_config(tmp_path / name / "config.yaml").train.micro_batch_size == 6
        require_equal(tmp_path / name, tmp_path / "one", 1e-6)

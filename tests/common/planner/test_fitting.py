"""train.recompute=auto: the fastest recomputation that fits, in as few blocks as possible."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from common.accelerators import Hardware, require_accelerator
from common.config.schema import RunConfig
from common.parallel.run import Run
from common.planner.fitting import Fitting, rank_memory, resolve_on, time_within
from common.planner.memory import memory_of
from common.resolve.derive import resolve_other
from common.run_config import load_config

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "gpt2"
H100, A100 = require_accelerator("H100"), require_accelerator("A100")


def preset(name: str, *overrides: str) -> RunConfig:
    return load_config(FOLDER / f"{name}.yaml", overrides)


def peak(config: Run) -> int:
    places = range(config.topology.pipeline)
    return max(memory_of(config, config.topology, place).peak for place in places)


def chosen(config: Run) -> tuple[int, str, int | None]:
    train = config.train
    return train.micro_batch_size, train.recompute, train.recompute_layers


@pytest.mark.parametrize(
    ("name", "micro"), [("run_gpt2_124m", 160), ("run_gpt2_774m", 40), ("run_gpt2_1558m", 16)]
)
def test_presets_recompute_nothing_on_a_card_with_80_gb(name: str, micro: int) -> None:
    assert chosen(resolve_on(preset(name), H100, world_size=1)) == (micro, "none", None)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("share", [1.0, 0.999, 0.9, 0.75, 0.6, 0.5, 0.4, 0.1])
def test_it_is_the_fastest_of_all_that_fit(share: float, layout: tuple[int, int]) -> None:
    """All modes and numbers of blocks are tried by brute force, with one micro batch."""
    tensor, pipeline = layout
    config = preset(
        "run_gpt2_774m",
        "train.micro_batch_size=16",
        f"parallel.model_parallel={tensor}",
        f"parallel.pipeline_stage={pipeline}",
    )
    question = Fitting(config, tensor * pipeline, None, None)
    limit = share * peak(question.resolve(recompute="none"))
    found = Fitting(config, tensor * pipeline, None, limit).fastest()
    times = {}
    for mode, count in product(("none", "selective", "full"), range(1, 37)):
        layers = None if mode == "none" or count == 36 else count
        tried = question.resolve(recompute=mode, recompute_layers=layers)
        if peak(tried) <= limit:
            times[mode, count] = time_within(tried, A100, limit)
    if not times:
        assert chosen(found) == (16, "full", None)
        return
    assert peak(found) <= limit
    assert time_within(found, A100, limit) == min(times.values())
    assert (found.train.recompute == "none") == (share == 1.0)


def test_a_micro_batch_and_recomputation_are_chosen_together() -> None:
    """On 40 GB more windows at once are worth recomputing attention in some blocks."""
    config = preset("run_gpt2_1558m", "train.compile=false")
    hardware = Hardware(kind="auto", name=A100.name, memory=A100.memory)
    limit = rank_memory(config, hardware)
    assert limit is not None
    found = resolve_on(config, A100, world_size=1)
    size, mode, layers = chosen(found)
    assert mode == "selective" and layers is not None and size > 1

    def seconds(size: int, mode: str, layers: int | None) -> Any:
        keys = {"micro_batch_size": size, "recompute": mode, "recompute_layers": layers}
        tried = resolve_other(config, world_size=1, hardware=hardware, train=keys)
        return time_within(tried, A100, limit)

    assert seconds(*chosen(found)) is not None
    assert seconds(size, mode, layers - 1) is None, "one block less does not fit"
    largest = max(each for each in (1, 2, 3, 4, 5, 6, 8) if seconds(each, "none", None))
    assert seconds(size, mode, layers) < seconds(largest, "none", None)


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [((), "full"), (("backend=mindspore",), "full"),
     (("backend=mindspore", "context.mode=pynative"), "none")],
)  # fmt: skip
def test_mindspore_recomputes_in_graphs_only(overrides: tuple[str, ...], mode: str) -> None:
    """With too little memory for anything."""
    found = Fitting(preset("run_gpt2_124m", *overrides), 1, None, 1.0).fastest()
    assert chosen(found) == (1, mode, None)


def test_nothing_is_recomputed_where_the_memory_is_unknown() -> None:
    config = preset("run_gpt2_1558m", "device=npu")
    assert chosen(resolve_on(config, None, world_size=1)) == (1, "none", None)


def test_ranks_on_this_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.planner.fitting.machine_memory", lambda: 40 * 2**30)
    words = ("device=cpu", "precision=float32", "train.micro_batch_size=auto")
    found = {
        size: chosen(resolve_on(preset("run_gpt2_124m", *words, *more), None, world_size=2))
        for size, more in {
            "shared": (),
            "half": ("device=npu", f"context.max_device_memory={40 * 0.94 / 2}GB"),
            "whole": ("device=npu", f"context.max_device_memory={40 * 0.94}GB"),
        }.items()
    }
    assert found["shared"] == found["half"] != found["whole"]

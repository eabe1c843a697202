"""train.recompute=auto: the fastest recomputation that fits, in as few blocks as possible."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from common.accelerators import require_accelerator
from common.parallel.loss_rows import with_loss_rows
from common.parallel.resolved_run import ResolvedRun
from common.planner.fitting import fitting_by_plan, rank_memory, time_within, with_fitting
from common.planner.memory import memory_of
from common.resolve.derive import resolve_config, with_micro_batch, with_recompute
from common.run_config import load_config

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "gpt2"
H100, A100 = require_accelerator("H100"), require_accelerator("A100")


def preset(name: str, *overrides: str, world_size: int = 1) -> ResolvedRun:
    return resolve_config(load_config(FOLDER / f"{name}.yaml", overrides), world_size=world_size)


def peak(config: ResolvedRun) -> int:
    places = range(config.topology.pipeline)
    return max(memory_of(config, config.topology, place).peak for place in places)


def chosen(config: ResolvedRun) -> tuple[int, str, int | None]:
    train = config.train
    assert not (train.micro_batch_is_auto or train.recompute_is_auto)
    return train.micro_batch_size, train.recompute, train.recompute_layers


@pytest.mark.parametrize(
    ("name", "micro"), [("run_gpt2_124m", 160), ("run_gpt2_774m", 32), ("run_gpt2_1558m", 16)]
)
def test_presets_recompute_nothing_on_a_card_with_80_gb(name: str, micro: int) -> None:
    assert chosen(with_fitting(preset(name), H100)) == (micro, "none", None)


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
        world_size=tensor * pipeline,
    )
    limit = share * peak(config)
    found = fitting_by_plan(config, limit, device=A100)
    times = {}
    for mode, count in product(("none", "selective", "full"), range(1, 37)):
        tried = with_recompute(config, mode, None if mode == "none" or count == 36 else count)
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
    config = preset("run_gpt2_1558m")
    limit = rank_memory(config, kind="", device_memory=A100.memory, ranks=1)
    assert limit is not None
    found = with_fitting(config, A100)
    size, mode, layers = chosen(found)
    assert mode == "selective" and layers is not None and size > 1

    def seconds(size: int, mode: str, layers: int | None) -> Any:
        tried = with_recompute(with_micro_batch(config, size), mode, layers)
        return time_within(with_loss_rows(tried, A100.memory), A100, limit)

    assert seconds(*chosen(found)) is not None
    assert seconds(size, mode, layers - 1) is None, "one block less does not fit"
    largest = max(each for each in (1, 2, 3, 4, 5, 6, 8) if seconds(each, "none", None))
    assert seconds(size, mode, layers) < seconds(largest, "none", None)


@pytest.mark.parametrize(
    ("overrides", "is_auto"),
    [((), True), (("backend=mindspore",), True),
     (("backend=mindspore", "context.mode=pynative"), False)],
)  # fmt: skip
def test_mindspore_recomputes_in_graphs_only(overrides: tuple[str, ...], is_auto: bool) -> None:
    config = preset("run_gpt2_124m", *overrides)
    assert config.train.recompute == "none" and config.train.recompute_is_auto == is_auto
    assert "recompute_is_auto" not in config.model_dump()["train"]


def test_nothing_is_recomputed_where_the_memory_is_unknown() -> None:
    config = preset("run_gpt2_1558m", "device=npu")
    assert chosen(with_fitting(config, None)) == (1, "none", None)
    assert chosen(fitting_by_plan(config, None)) == (960, "none", None)

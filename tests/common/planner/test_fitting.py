"""train.recompute=auto: the fastest recomputation that fits, in as few blocks as possible."""

from itertools import product

import pytest

from common.parallel.run import Run
from common.planner.fitting import Fitting, resolve_on
from common.planner.plan import make_plan, time_of
from tests.common.planner.runs import A100, H100, written


def chosen(config: Run) -> tuple[int, str, int | None]:
    train = config.train
    return train.micro_batch_size, train.recompute, train.recompute_layers


def seconds(run: Run) -> float:
    return time_of(make_plan(run), run, A100).total


@pytest.mark.parametrize(
    ("name", "micro"), [("run_gpt2_124m", 160), ("run_gpt2_774m", 40), ("run_gpt2_1558m", 16)]
)
def test_presets_recompute_nothing_on_a_card_with_80_gb(name: str, micro: int) -> None:
    assert chosen(resolve_on(written(name), H100, world_size=1)) == (micro, "none", None)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("share", [1.0, 0.999, 0.75, 0.5, 0.1])
def test_it_is_the_fastest_of_all_that_fit(share: float, layout: tuple[int, int]) -> None:
    """All modes and numbers of blocks are tried by brute force, with one micro batch."""
    tensor, pipeline = layout
    axes = (f"parallel.model_parallel={tensor}", f"parallel.pipeline_stage={pipeline}")
    config = written("run_gpt2_774m", "train.micro_batch_size=16", *axes)
    question = Fitting(config, tensor * pipeline, None, None)
    limit = share * make_plan(question.resolve(recompute="none")).peak
    found = Fitting(config, tensor * pipeline, None, limit).fastest()
    times = {}
    for mode, count in product(("none", "selective", "full"), range(1, 37)):
        layers = None if mode == "none" or count == 36 else count
        tried = question.resolve(recompute=mode, recompute_layers=layers)
        if make_plan(tried).peak <= limit:
            times[mode, count] = seconds(tried)
    if not times:
        assert chosen(found) == (16, "full", None)
        return
    assert make_plan(found).peak <= limit
    assert seconds(found) == min(times.values())
    assert (found.train.recompute == "none") == (share == 1.0)


def test_a_micro_batch_and_recomputation_are_chosen_together() -> None:
    """On 40 GB more windows at once are worth recomputing attention in some blocks."""
    config = written("run_gpt2_1558m", "train.compile=false")
    question = Fitting.on(A100, config, 1)
    found = resolve_on(config, A100, world_size=1)
    size, mode, layers = chosen(found)
    assert mode == "selective" and layers is not None and size > 1
    less = question.resolve(micro_batch_size=size, recompute=mode, recompute_layers=layers - 1)
    assert question.fits(found) and not question.fits(less)
    plain = [question.resolve(micro_batch_size=n, recompute="none") for n in (1, 2, 3, 4, 5, 6, 8)]
    assert seconds(found) < seconds([run for run in plain if question.fits(run)][-1])


def test_mindspore_recomputes_in_graphs_only() -> None:
    """With too little memory for anything; and where the memory is unknown nothing is."""
    pynative = ("backend=mindspore", "context.mode=pynative")
    for overrides, mode in (((), "full"), (pynative[:1], "full"), (pynative, "none")):
        found = Fitting(written("run_gpt2_124m", *overrides), 1, None, 1.0).fastest()
        assert chosen(found) == (1, mode, None)
    config = written("run_gpt2_1558m", "device=npu")
    assert chosen(resolve_on(config, None, world_size=1)) == (1, "none", None)


def test_ranks_on_this_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.planner.room.machine_memory", lambda: 40 * 2**30)
    words = ("device=cpu", "precision=float32", "train.micro_batch_size=auto")
    shared, half, whole = (
        chosen(resolve_on(written("run_gpt2_124m", *words, *more), None, world_size=2))
        for more in (
            (),
            ("device=npu", f"context.max_device_memory={40 * 0.94 / 2}GB"),
            ("device=npu", f"context.max_device_memory={40 * 0.94}GB"),
        )
    )
    assert shared == half != whole

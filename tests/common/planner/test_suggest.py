"""Suggested layouts: all of N devices, each held against the memory given, and a reason for every
other. train.recompute=auto: the fastest recomputation that fits, in as few blocks as possible.
"""

import time
from itertools import product
from typing import Any

import pytest

from common.accelerators import Accelerator, Hardware, require_accelerator
from common.errors import ConfigError
from common.parallel.pipeline import schedule_error
from common.parallel.run import Run
from common.planner.fitting import Fitting, memory_limit, resolve_on
from common.planner.plan import make_plan, time_of
from common.planner.suggest import EQUAL, Layout, Suggestions, describe_suggestions, suggest, with_larger_batches
from common.resolve.derive import resolve_other
from tests.common.planner import runs
from tests.common.planner.runs import A100, ASCEND, H100, preset, written

A100_80 = require_accelerator("A100 80GB")
LARGE = {"num_layers": 24, "hidden_size": 4096, "num_heads": 32, "seq_length": 1024}


def small(**sections: Any) -> Run:
    model = {"hidden_size": 48, "num_heads": 6, **sections.pop("model", {})}
    train = {"micro_batch_size": 1, "global_batch_size": 12, **sections.pop("train", {})}
    return runs.small(model=model, train={**train, "accumulation_steps": None}, **sections)


Axes = tuple[int, int, int]


def axes(layout: Layout) -> Axes:
    topology = layout.config.topology
    return topology.data, topology.tensor, topology.pipeline


def reasons(found: Suggestions) -> dict[Axes, str]:
    return {(each.data, each.tensor, each.pipeline): reason for reason, some in found[1].items() for each in some}


def pasted(config: Run, layout: Layout, devices: int, device: Accelerator) -> list[str]:
    """The words that a table with this layout alone ends with."""
    text = describe_suggestions(config, ([layout], {}), devices, device)
    [line] = [each for each in text.splitlines() if each.startswith("The first: ")]
    return line.removeprefix("The first: ").split()


def test_every_layout_is_suggested_or_refused() -> None:
    tutorial = preset("run_gpt2_13b")
    found = suggest(tutorial, 32, ASCEND)
    fitting = [axes(layout) for layout in found[0]]
    possible = {at for at in product(range(1, 33), repeat=3) if at[0] * at[1] * at[2] == 32}
    assert sorted([*fitting, *reasons(found)]) == sorted(possible)
    seconds = [layout.seconds for layout in found[0]]
    assert seconds == sorted(seconds) and len(seconds) > 5
    # MindFormers' own layout of 32 fits, and is not faster than what is suggested
    assert (4, 2, 4) in fitting
    assert seconds[0] <= time_of(make_plan(tutorial), ASCEND).total
    for layout in found[0]:
        assert make_plan(layout.config).peak < 31 * 2**30  # context.max_device_memory=31GB of the preset
        assert layout.config.train.global_batch_size == 192 and layout.config.train.micro_batch_size % 2 == 0


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("parallel.pipeline_stage=2 parallel.stage_layers=[7,5]", 2),
        ("train.accumulation_steps=4 train.global_batch_size=null", 1),
        ("parallel.data_parallel=8 parallel.zero_stage=3 parallel.shard_size=2", 8),
        ("parallel.model_parallel=2 train.recompute_slice_activation=true backend=mindspore", 2),
        ("train.recompute=full train.recompute_layers=3", 1),
    ],
)
def test_every_suggestion_can_be_pasted(text: str, ranks: int) -> None:
    """Behind a command that has keys which other layouts cannot keep, and makes the plan shown."""
    words = ["train.micro_batch_size=4", *text.split()]
    fitting, _ = suggest(config := preset("run_gpt2_124m", *words, ranks=ranks), 8, A100)
    assert len(fitting) > 2
    for layout in fitting:
        again = written("run_gpt2_124m", *words, *pasted(config, layout, 8, A100))
        run = resolve_on(again, A100, world_size=8)
        assert (run.topology, run.train) == (layout.config.topology, layout.config.train)
        assert make_plan(run).stages == make_plan(layout.config).stages


def test_reasons_and_no_devices() -> None:
    found = reasons(suggest(small(), 12, ASCEND))
    assert not {(12, 1, 1), (6, 2, 1), (3, 1, 4), (1, 3, 4), (1, 6, 2)} & {*found}
    found |= reasons(suggest(small(train={"global_batch_size": 4}), 8, ASCEND))
    for layout, reason in (
        ((1, 12, 1), "tensor parallel would leave a server of 8 devices"),
        ((3, 4, 1), "parallel.model_parallel=4 does not divide model.num_heads=6"),
        ((4, 1, 3), "parallel.pipeline_stage=3 does not divide model.num_layers=4"),
        ((8, 1, 1), "train.global_batch_size=4 is no"),
        ((4, 1, 2), "1f1b needs at least 2 micro batches, one per stage, not 1"),
    ):
        assert found[layout].startswith(reason)
    for devices in (0, 999999937):
        with pytest.raises(ConfigError, match=f"--devices {devices}: .*at least 1 and at most 262144"):
            suggest(small(), devices, ASCEND)


def test_nothing_fits() -> None:
    found = suggest(config := preset("run_gpt2_175b", "parallel.data_parallel=null"), 8, ASCEND)
    assert found[0] == []
    text = describe_suggestions(config, found, 8, ASCEND)
    assert "\nnone fits; use more devices\n" in text, "micro batch 1, in float16"
    # 32 but for 2.4
    assert "more than the 29.6 GiB of Ascend 910A, whatever ZeRO and recomputation do" in text
    # MindFormers' preset has a limit for its own 32 GB, and an H100 has 80
    text = describe_suggestions(config := preset("run_gpt2_13b"), suggest(config, 8, H100), 8, H100)
    limit = "context.max_device_memory=31GB"
    assert text.startswith(f"Layouts for 8 x H100 (80 GiB, {limit}), by the time of a step")
    assert f"more than the 31.0 GiB of {limit}, whatever ZeRO" in text


def tried_one_by_one(config: Run, at: Axes) -> Layout | None:
    """The fastest way of all that fit, by their whole plans."""
    best, hardware = None, Hardware(kind="auto", name=ASCEND.name, memory=ASCEND.memory)
    keys = dict(zip(("data_parallel", "model_parallel", "pipeline_stage"), at, strict=True))
    # MindSpore has neither ZeRO 2 nor sequence parallelism, which only a training refuses
    zeros, sequences = (2, 1) if config.backend == "mindspore" else (4, 2)
    for zero, mode, sequence in product(range(zeros), ("none", "selective", "full"), (False, True)[:sequences]):
        parallel = {**keys, "zero_stage": zero, "sequence_parallel": sequence}
        changes = {"parallel": parallel, "train": {"accumulation_steps": None, "recompute": mode}}
        try:
            run = resolve_other(config, world_size=24, hardware=hardware, device="auto", **changes)
        except ConfigError:
            continue
        plan, seconds = make_plan(run), time_of(make_plan(run), ASCEND).total
        cannot = schedule_error(run.parallel.pipeline_schedule, run.topology, run.train.accumulation_steps)
        is_faster = best is None or seconds < best.seconds * (1 - EQUAL)
        if plan.peak <= (memory_limit(run, ASCEND) or 0) and not cannot and is_faster:
            best = Layout(config=run, seconds=seconds)
    return best


@pytest.mark.parametrize("memory", [8, 24])
@pytest.mark.parametrize(
    ("schedule", "sections"),
    [
        ("1f1b", {}),
        ("1f1b", {"backend": "mindspore"}),
        ("1f1b", {"engine": "deepspeed"}),
        ("interleaved_1f1b", {}),
        ("interleaved_zero_bubble", {}),
        ("zbv_zero_bubble", {"precision": {"compute": "bfloat16"}}),
    ],
)
def test_nothing_is_lost_by_what_is_not_tried(schedule: str, sections: dict[str, Any], memory: int) -> None:
    """Some ranks and less recomputation settle what all ranks and every way would: the same
    layouts, in the same time.
    """
    model, context = {**LARGE, "vocab_size": 50257}, {"max_device_memory": f"{memory}GB"}
    sections = sections | {"context": context, "parallel": {"pipeline_schedule": schedule}}
    config = small(model=model, train={"global_batch_size": 48}, **sections)
    found = suggest(config, 24, ASCEND)
    tried = {at for at in {*map(axes, found[0]), *reasons(found)} if at[1] <= ASCEND.server_devices}
    wanted = {at: tried_one_by_one(config, at) for at in tried}
    fitting = {at: with_larger_batches(layout, ASCEND) for at, layout in wanted.items() if layout is not None}
    assert {axes(layout): layout.seconds for layout in found[0]} == (
        pytest.approx({at: layout.seconds for at, layout in fitting.items()})
    )
    assert all(layout.config == fitting[axes(layout)].config for layout in found[0])


def test_layouts_of_as_many_stages_and_micro_batches_as_there_are_take_seconds() -> None:
    """221760 = 2^6 x 3^2 x 5 x 7 x 11 devices have 4536 layouts, and a batch of 4 samples a device
    divides among them all.
    """
    start = time.process_time()
    model = {"num_layers": 5040, "hidden_size": 840, "num_heads": 840, "seq_length": 1024, "vocab_size": 50257}
    train, parallel = {"global_batch_size": 4 * 221760}, {"pipeline_schedule": "interleaved_zero_bubble"}
    found = suggest(small(model=model, train=train, parallel=parallel), 221760, require_accelerator("910B1"))
    assert len(found[0]) + len(reasons(found)) == 4536
    assert time.process_time() - start < 30, "counted one by one it never ends, or takes minutes"


def with_batch(layout: Layout, size: int) -> Run:
    """The run of a layout with another micro batch."""
    run, train = layout.config, {"micro_batch_size": size, "accumulation_steps": None}
    ranks = run.topology.world_size
    return resolve_other(run, world_size=ranks, hardware=run.hardware, train=train)


def test_each_layout_has_the_largest_micro_batch_that_fits() -> None:
    """The next larger one does not fit, or leaves fewer micro batches than stages."""
    config = preset("run_gpt2_1558m", "train.micro_batch_size=auto", "train.compile=false")
    found = suggest(config, 8, H100, is_auto=True)
    limit, full = memory_limit(config, H100), config.train.global_batch_size
    assert limit is not None and len(found[0]) == 4
    sizes = []
    for layout in found[0]:
        data, _, pipeline = axes(layout)
        size, plan = layout.config.train.micro_batch_size, make_plan(layout.config)
        assert plan.peak <= limit and size * plan.run.train.accumulation_steps * data == full
        larger = next(each for each in range(size + 1, full + 1) if full % (each * data) == 0)
        more = with_batch(layout, larger)
        assert make_plan(more).peak > limit or more.train.accumulation_steps < pipeline
        sizes.append(size)
    assert len({*sizes}) > 1
    text = describe_suggestions(config, found, 8, H100)
    assert f" train.micro_batch_size={sizes[0]} train.recompute=" in text


def test_a_given_micro_batch_doubles_while_that_is_faster() -> None:
    for layout in suggest(preset("run_gpt2_175b"), 128, A100_80)[0]:
        size = layout.config.train.micro_batch_size
        for other in {size // 2, size * 2} - {0}:
            plan = make_plan(with_batch(layout, other))
            assert time_of(plan, A100_80).total >= layout.seconds or plan.peak > A100_80.memory * 0.94


def test_ties_are_named_and_reasons_take_a_line_each() -> None:
    found = suggest(config := preset("run_gpt2_175b"), 384, A100_80)
    lines = describe_suggestions(config, found, 384, A100_80).splitlines()
    [tie] = [line for line in lines if "which is a tie" in line]
    count = int(tie.split()[2])
    rows = [line.split() for line in lines[2 : 2 + count]]
    seconds, memory = ([float(row[column]) for row in rows] for column in (8, 7))
    assert count > 1 and max(seconds) <= 1.035 * min(seconds) and memory == sorted(memory)
    said = lines[lines.index("Not possible:") + 1 :]
    assert said[0].startswith("  data 1-32, tensor 12-384, pipeline 1-32 (41 layouts): tensor parallel would leave")
    assert len(describe_suggestions(config, found, 384, A100_80, all_layouts=True).splitlines()) > len(found[0])


# ---- recomputation ----


def chosen(config: Run) -> tuple[int, str, int | None]:
    train = config.train
    return train.micro_batch_size, train.recompute, train.recompute_layers


def seconds(run: Run) -> float:
    return time_of(make_plan(run), A100).total


@pytest.mark.parametrize(("name", "micro"), [("run_gpt2_124m", 160), ("run_gpt2_774m", 40), ("run_gpt2_1558m", 16)])
def test_presets_recompute_nothing_on_a_card_with_80_gb(name: str, micro: int) -> None:
    assert chosen(resolve_on(written(name), H100, world_size=1)) == (micro, "none", None)


@pytest.mark.parametrize("axis", ["data_parallel=1", "model_parallel=2", "pipeline_stage=2"])
@pytest.mark.parametrize("share", [1.0, 0.999, 0.75, 0.5, 0.1])
def test_it_is_the_fastest_of_all_that_fit(share: float, axis: str) -> None:
    """All modes and numbers of blocks are tried by brute force, with one micro batch."""
    config = written("run_gpt2_774m", "train.micro_batch_size=16", f"parallel.{axis}")
    question = Fitting(config, int(axis[-1]), None, None)
    limit = share * make_plan(question.resolve(recompute="none")).peak
    found = Fitting(config, int(axis[-1]), None, limit).fastest()
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
    monkeypatch.setattr("common.planner.fitting.machine_memory", lambda: 40 * 2**30)

    def found(*more: str) -> tuple[int, str, int | None]:
        words = ("device=cpu", "precision=float32", "train.micro_batch_size=auto")
        return chosen(resolve_on(written("run_gpt2_124m", *words, *more), None, world_size=2))

    half, whole = (found("device=npu", f"context.max_device_memory={40 * 0.94 / n}GB") for n in (2, 1))
    assert found() == half != whole

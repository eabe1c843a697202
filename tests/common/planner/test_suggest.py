"""Suggested layouts: all of N devices, each held against the memory given, and a reason for every
other.
"""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.accelerators import require_accelerator
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.parallel.topology import Topology
from common.planner.fitting import resolve_on, telling_places
from common.planner.plan import make_plan, memory_limit, time_of
from common.planner.suggest import (
    EQUAL,
    Layout,
    Suggestions,
    _keys,
    _resolved,
    _ways,
    describe_suggestions,
    suggest,
    with_larger_batches,
)
from common.resolve.derive import resolve_config, resolve_other, written_ranks
from common.run_config import load_config

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "gpt2"
ASCEND = require_accelerator("Ascend 910A")


def preset(name: str, *overrides: str) -> RunConfig:
    config = load_config(FOLDER / f"{name}.yaml", overrides)
    return resolve_config(config, world_size=written_ranks(config))


def layouts(found: Suggestions) -> set[tuple[int, int, int]]:
    plans = [layout.plan.topology for layout in found.fitting] + [
        layout for some in found.refused.values() for layout in some
    ]
    return {(plan.data, plan.tensor, plan.pipeline) for plan in plans}


def test_every_layout_is_suggested_or_refused() -> None:
    found = suggest(preset("run_gpt2_13b"), 32, ASCEND)
    wanted = {
        (d, t, p)
        for d in range(1, 33)
        for t in range(1, 33)
        for p in range(1, 33)
        if d * t * p == 32
    }
    assert layouts(found) == wanted
    assert len(found.fitting) + sum(map(len, found.refused.values())) == len(wanted)
    seconds = [layout.seconds for layout in found.fitting]
    assert seconds == sorted(seconds) and len(seconds) > 5
    # MindFormers' own layout of 32 fits, and is not faster than what is suggested
    tutorial = preset("run_gpt2_13b")
    assert (4, 2, 4) in {
        (some.plan.topology.data, some.plan.topology.tensor, some.plan.topology.pipeline)
        for some in found.fitting
    }
    assert seconds[0] <= time_of(make_plan(tutorial), tutorial, ASCEND).total


def test_suggestions_fit_and_are_runs() -> None:
    """The words of a suggestion, given to the file it came from, make the plan it shows."""
    config = preset("run_gpt2_13b", "backend=torch", "train.recompute_slice_activation=false")
    found = suggest(config, 16, require_accelerator("Ascend 910B2"))
    for layout in found.fitting:
        assert layout.plan.peak < 31 * 2**30  # context.max_device_memory=31GB of the preset
        assert layout.plan.batch.global_batch == 192 and layout.plan.batch.micro_batch % 2 == 0
    text = describe_suggestions(found, 16, require_accelerator("Ascend 910B2"))
    (words,) = [
        line.removeprefix("The first: ").split()
        for line in text.splitlines()
        if line.startswith("The first: ")
    ]
    again = preset(
        "run_gpt2_13b", "backend=torch", "train.recompute_slice_activation=false", *words
    )
    hardware = found.fitting[0].config.hardware
    again = resolve_other(again, world_size=16, hardware=hardware)
    assert make_plan(again) == found.fitting[0].plan


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("parallel.pipeline_stage=2", "parallel.stage_layers=[7,5]"), 2),
        (("train.accumulation_steps=4", "train.global_batch_size=null"), 1),
        (("parallel.micro_batch_num=4", "train.global_batch_size=null"), 1),
        (("parallel.data_parallel=8", "parallel.zero_stage=3", "parallel.shard_size=2"), 8),
        (
            (
                "parallel.model_parallel=2",
                "train.recompute_slice_activation=true",
                "backend=mindspore",
            ),
            2,
        ),
        (("train.recompute=full", "train.recompute_layers=3"), 1),
    ],
)
def test_every_suggestion_can_be_pasted(words: tuple[str, ...], ranks: int) -> None:
    """Behind a command that has keys which other layouts cannot keep."""
    words = ("train.micro_batch_size=4", *words)
    written, device = load_config(FOLDER / "run_gpt2_124m.yaml", words), require_accelerator("A100")
    config = resolve_config(written, world_size=ranks)
    found = suggest(config, 8, device)
    assert len(found.fitting) > 2
    for layout in found.fitting:
        text = describe_suggestions(replace(found, fitting=(layout,)), 8, device)
        [line] = [each for each in text.splitlines() if each.startswith("The first: ")]
        pasted = line.removeprefix("The first: ").split()
        again = load_config(FOLDER / "run_gpt2_124m.yaml", [*words, *pasted])
        assert make_plan(resolve_on(again, device, world_size=8)) == layout.plan


def small(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "output_dir": "nowhere",
        "model": {
            "num_layers": 4,
            "hidden_size": 48,
            "num_heads": 6,
            "seq_length": 32,
            "vocab_size": 1000,
        },
        "train": {"micro_batch_size": 1, "global_batch_size": 12},
        "optimizer": {"learning_rate": 0.1},
    }
    return resolve_config(build_config({**tree, **sections}))


def refused(config: RunConfig, devices: int) -> dict[tuple[int, int, int], str]:
    found = suggest(config, devices, ASCEND)
    return {
        (each.data, each.tensor, each.pipeline): reason
        for reason, some in found.refused.items()
        for each in some
    }


def test_reasons() -> None:
    reasons = refused(small(), 12)
    assert reasons[1, 12, 1] == "tensor parallel would leave a server of 8 devices"
    assert reasons[3, 4, 1] == "parallel.model_parallel=4 does not divide model.num_heads=6"
    assert reasons[4, 1, 3] == "parallel.pipeline_stage=3 does not divide model.num_layers=4"
    for possible in ((12, 1, 1), (6, 2, 1), (3, 1, 4), (1, 3, 4), (1, 6, 2)):
        assert possible not in reasons
    assert refused(small(train={"micro_batch_size": 1, "global_batch_size": 4}), 6)[
        6, 1, 1
    ].startswith("train.global_batch_size=4 is no")
    assert refused(small(train={"micro_batch_size": 1, "global_batch_size": 4}), 8)[4, 1, 2] == (
        "1f1b needs at least 2 micro batches, one per stage, not 1"
    )
    assert (1, 2, 1) not in refused(small(engine="deepspeed"), 2)


def test_nothing_fits() -> None:
    config = preset("run_gpt2_175b", "parallel.data_parallel=null")
    found = suggest(config, 8, ASCEND)
    assert found.fitting == ()
    text = describe_suggestions(found, 8, ASCEND)
    assert "none fits; use more devices" in text
    # 32 but for 2.4
    assert (
        "more than the 29.6 GiB of a device, whatever ZeRO and recomputation do" in text
        and "GB" not in text
    )


def test_zero_and_recomputation_are_used_only_where_they_are_needed() -> None:
    """A model that fits as it is keeps whole state and recomputes nothing; DeepSpeed's pipeline has
    only ZeRO stages 0 and 1.
    """
    for engine in ("native", "deepspeed"):
        for layout in suggest(small(engine=engine), 4, ASCEND).fitting:
            assert layout.config.train.recompute == "none"
    config, piped = small(engine="deepspeed"), Topology(data=2, pipeline=2)
    ways = list(_ways(config, piped))
    assert {zero for zero, *_ in ways} == {0, 1}
    for zero, recompute, sequence in ways:
        keys = _keys(config, piped, zero, recompute, sequence)
        made = _resolved(config, piped, ASCEND, math.inf, *keys)
        assert not isinstance(made, str), made


@pytest.mark.parametrize("devices", [0, -3])
def test_no_devices(devices: int) -> None:
    with pytest.raises(
        ConfigError, match=f"--devices {devices}: expected how many there are, at least 1"
    ):
        suggest(small(), devices, ASCEND)


def test_more_devices_than_any_cluster_has() -> None:
    with pytest.raises(ConfigError, match=r"--devices 999999937: .* at most 262144"):
        suggest(small(), 999999937, ASCEND)


def test_layouts_of_a_model_without_end_take_seconds() -> None:
    start = time.process_time()
    endless = {
        "num_layers": 2**40,
        "hidden_size": 48,
        "num_heads": 6,
        "seq_length": 32,
        "vocab_size": 1000,
    }
    assert not suggest(small(model=endless), 221760, ASCEND).fitting
    assert time.process_time() - start < 30, "counted layer by layer it never ends"


def tried_one_by_one(config: RunConfig, topology: Topology) -> Layout | None:
    """The fastest way of all that fit, by their whole plans."""
    best = None
    limit = memory_limit(config, ASCEND)
    for zero, recompute, sequence in _ways(config, topology):
        parallel, train = _keys(config, topology, zero, recompute, sequence)
        candidate = _resolved(config, topology, ASCEND, limit or 0, parallel, train)
        if isinstance(candidate, str):
            continue
        if (plan := make_plan(candidate)).peak > (limit or 0):
            continue
        seconds = time_of(plan, candidate, ASCEND).total
        if best is None or seconds < best.seconds * (1 - EQUAL):
            best = Layout(config=candidate, seconds=seconds)
    return best


@pytest.mark.parametrize("memory", [8, 24, 80])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"backend": "mindspore"},
        {"engine": "deepspeed"},
        {"parallel": {"pipeline_schedule": "interleaved_1f1b"}},
        {"parallel": {"pipeline_schedule": "interleaved_zero_bubble"}},
        {
            "parallel": {"pipeline_schedule": "zbv_zero_bubble"},
            "precision": {"compute": "bfloat16"},
        },
    ],
)
def test_nothing_is_lost_by_what_is_not_tried(sections: dict[str, Any], memory: int) -> None:
    """Some ranks and less recomputation settle what all ranks and every way would: the same
    layouts, in the same time.
    """
    model = {
        "num_layers": 24,
        "hidden_size": 4096,
        "num_heads": 32,
        "seq_length": 1024,
        "vocab_size": 50257,
    }
    train = {"micro_batch_size": 1, "global_batch_size": 48}
    config = small(
        **{
            "model": model,
            "train": train,
            "context": {"max_device_memory": f"{memory}GB"},
            **sections,
        }
    )
    found = suggest(config, 24, ASCEND)
    wanted = [
        tried_one_by_one(config, Topology(data=d, tensor=t, pipeline=p))
        for d, t, p in layouts(found)
        if t <= ASCEND.server_devices
    ]
    fitting = [with_larger_batches(layout, ASCEND) for layout in wanted if layout is not None]
    assert {str(layout.plan.topology): layout.seconds for layout in found.fitting} == (
        pytest.approx({str(layout.plan.topology): layout.seconds for layout in fitting})
    )
    chosen = {str(layout.plan.topology): layout.config for layout in fitting}
    assert all(layout.config == chosen[str(layout.plan.topology)] for layout in found.fitting)
    for layout in found.fitting:
        stages = layout.plan.stages
        assert layout.plan.peak == max(
            stages[place].memory.peak for place in telling_places(layout.plan.topology)
        )


@pytest.mark.parametrize(
    ("schedule", "sections"),
    [
        ("1f1b", {"num_layers": 221760}),
        ("zbv_zero_bubble", {"num_layers": 221760}),
        ("interleaved_zero_bubble", {"num_layers": 5040, "hidden_size": 840, "num_heads": 840}),
    ],
)
def test_layouts_of_as_many_stages_and_micro_batches_as_there_are_take_seconds(
    schedule: str, sections: dict[str, int]
) -> None:
    """221760 = 2^6 x 3^2 x 5 x 7 x 11 devices have 4536 layouts, and a batch of 4 samples a device
    divides among them all.
    """
    start = time.process_time()
    model = {
        "hidden_size": 5120,
        "num_heads": 40,
        "seq_length": 1024,
        "vocab_size": 50257,
        **sections,
    }
    train = {"micro_batch_size": 1, "global_batch_size": 4 * 221760}
    config = small(model=model, train=train, parallel={"pipeline_schedule": schedule})
    found = suggest(config, 221760, require_accelerator("Ascend 910B1"))
    assert len(layouts(found)) == 4536
    assert time.process_time() - start < 30, "played pass by pass it takes minutes"


def test_each_layout_has_the_largest_micro_batch_that_fits() -> None:
    """The next larger one does not fit, or leaves fewer micro batches than stages."""
    device = require_accelerator("H100")
    config = preset("run_gpt2_1558m", "train.micro_batch_size=auto", "train.compile=false")
    found = suggest(config, 8, device, is_auto=True)
    limit = memory_limit(config, device)
    assert limit is not None and len(found.fitting) == 4
    for layout in found.fitting:
        train, batch = layout.config.train, layout.plan.batch
        assert layout.plan.peak <= limit
        assert train.micro_batch_size * batch.accumulation * layout.plan.topology.data == (
            config.train.global_batch_size
        )
        larger = [
            size
            for size in range(train.micro_batch_size + 1, config.train.global_batch_size + 1)
            if config.train.global_batch_size % (size * layout.plan.topology.data) == 0
        ]
        more = resolve_other(
            layout.config,
            world_size=8,
            hardware=layout.config.hardware,
            train={"micro_batch_size": larger[0], "accumulation_steps": None},
        )
        assert (
            make_plan(more).peak > limit or more.batch.accumulation < layout.plan.topology.pipeline
        )
    assert len({layout.config.train.micro_batch_size for layout in found.fitting}) > 1
    text = describe_suggestions(found, 8, device)
    best = found.fitting[0].config.train.micro_batch_size
    assert f" train.micro_batch_size={best} train.recompute=" in text


def test_a_given_micro_batch_doubles_while_that_is_faster() -> None:
    device = require_accelerator("A100 80GB")
    config = preset("run_gpt2_175b")
    found = suggest(config, 128, device)
    for layout in found.fitting:
        size, tries = layout.config.train.micro_batch_size, []
        for other in (size // 2, size * 2):
            if other:
                keys = {"micro_batch_size": other, "accumulation_steps": None}
                made = resolve_other(
                    layout.config, world_size=128, hardware=layout.config.hardware, train=keys
                )
                tries += [time_of(plan := make_plan(made), made, device).total]
                if plan.peak > device.memory * 0.94:
                    tries.pop()
        assert size in (1, 2, 4, 8) and all(layout.seconds <= each for each in tries)


def test_ties_are_named_and_reasons_take_a_line_each() -> None:
    device = require_accelerator("A100 80GB")
    found = suggest(preset("run_gpt2_175b"), 384, device)
    lines = describe_suggestions(found, 384, device).splitlines()
    [tie] = [line for line in lines if "which is a tie" in line]
    count = int(tie.split()[2])
    rows = [line.split() for line in lines[2 : 2 + count]]
    seconds, memory = ([float(row[column]) for row in rows] for column in (8, 7))
    assert count > 1 and max(seconds) <= 1.035 * min(seconds) and memory == sorted(memory)
    reasons = lines[lines.index("Not possible:") + 1 :]
    assert reasons[0] == (
        "  data 1-32, tensor 12-384, pipeline 1-32 (41 layouts): tensor parallel would leave a"
        " server of 8 devices"
    )
    assert len(reasons) == 4 and max(map(len, reasons)) < 140
    everything = describe_suggestions(found, 384, device, all_layouts=True).splitlines()
    assert len(everything) == len(found.fitting) + 2 * len(reasons) + 7

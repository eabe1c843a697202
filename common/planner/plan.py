"""Plan of a run before it starts: ranks, batch, memory and messages of each rank, and step time.

It is arithmetic on the config, without a framework or a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

from common.accelerators import GIB, Accelerator
from common.cluster.places import RankPlacement
from common.parallel.batch import BatchPlan
from common.parallel.fused_attention import FIRST_ASCEND
from common.parallel.learning_rate import describe_schedule, schedule_warnings
from common.parallel.pipeline import bubble, schedule_error
from common.parallel.ramp import describe_ramp
from common.parallel.run import Run
from common.parallel.topology import GroupKind, Topology
from common.planner.communication import Traffic, traffic_of
from common.planner.memory import Memory, has_low_gradients, memory_of, shard_ranks, units_of
from common.planner.timing import StepTime, step_time
from common.weights.names import count_parameters

_LISTED = 64


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Memory and messages of each rank at one place of the pipeline.

    Its tensor and data-parallel ranks have equally much.
    """

    stages: tuple[int, ...]
    layers: tuple[range, ...]
    """Layers of each stage, in the order of ``stages``."""
    parameters: int
    """Number of elements before ZeRO splits, with padding and the last stage's copy of the tied
    embedding.
    """
    memory: Memory
    traffic: Traffic


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Arithmetic of a run. ``parameters`` counts the model's, without padding and each once."""

    topology: Topology
    batch: BatchPlan
    tokens_per_step: int
    parameters: int
    stages: tuple[StagePlan, ...]
    """Plans by place on the pipeline axis."""

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(stage.memory.peak for stage in self.stages)


def make_plan(config: Run) -> Plan:
    """Compute the plan of a run. Raises ConfigError if layers do not divide into stages."""
    topology = config.topology
    return Plan(
        topology=topology,
        batch=config.batch,
        tokens_per_step=config.batch.global_batch * config.model.seq_length,
        parameters=count_parameters(config.model),
        stages=tuple(_plan_place(config, topology, place) for place in range(topology.pipeline)),
    )


def _plan_place(config: Run, topology: Topology, place: int) -> StagePlan:
    return StagePlan(
        stages=topology.stages_of(place),
        layers=tuple(
            topology.layers_of_stage(stage, config.model.num_layers)
            for stage in topology.stages_of(place)
        ),
        parameters=sum(unit.elements * unit.count for unit in units_of(config, topology, place)),
        memory=memory_of(config, topology, place),
        traffic=traffic_of(config, topology, place),
    )


def time_of(plan: Plan, config: Run, device: Accelerator) -> StepTime:
    held = ((place, stage.memory, stage.traffic) for place, stage in enumerate(plan.stages))
    return step_time(config, plan.topology, device, held)


def describe_plan(
    plan: Plan,
    config: Run,
    *,
    all_ranks: bool = False,
    places: Sequence[RankPlacement] = (),
    device: Accelerator | None = None,
) -> str:
    """Return the plan as text: the arithmetic, a table of stages and a table of ranks.

    The middle ones of more than 64 ranks are shown only with ``all_ranks``. places: of every rank
    in order, if known, to show host and device. device: the one whose step time to estimate.
    """
    topology, batch = plan.topology, plan.batch
    lines = [
        f"world: {topology}",
        f"batch: {batch} samples; {plan.tokens_per_step:,} tokens a step",
        *_ramp_lines(config),
        *_window_lines(config),
        *_schedule_lines(config),
        f"model: {plan.parameters:,} parameters; vocabulary {config.model.vocab_size}, padded to"
        f" {config.vocab_rows}",
    ]
    if topology.pipeline > 1:
        lines += _pipeline_lines(plan, config)
    lines += [
        "",
        *_memory_lines(plan, config),
        *_room(plan, config, device),
        *_kernels_to_check(config, device),
        "",
        *_traffic_lines(plan),
    ]
    if device is not None:
        lines += ["", *_time_lines(plan, config, device)]
    if topology.world_size > 1 or places:
        lines += [
            "",
            *table(
                (*_RANK, *(_PLACE if places else ()), *(f"{kind} group" for kind in _SHOWN)),
                _rank_rows(topology, all_ranks, places),
            ),
        ]
    return "\n".join(lines) + "\n"


def _window_lines(config: Run) -> Iterable[str]:
    window, stride = config.model.seq_length, config.data.stride
    if stride is not None and stride < window:
        yield (
            f"windows: {window} tokens, one every {stride}: an epoch takes {window / stride:.2f}"
            " times the steps that it takes without overlap"
        )


def _schedule_lines(config: Run) -> Iterable[str]:
    """Describe the schedule. Its warnings need the length in steps, which epochs have with data."""
    yield f"schedule: {describe_schedule(config.optimizer)}"
    if config.train.max_steps is not None:
        yield from (f"warning: {warning}" for warning in schedule_warnings(config))


def _pipeline_lines(plan: Plan, config: Run) -> Iterable[str]:
    schedule, micro_batches = config.parallel.pipeline_schedule, plan.batch.accumulation
    waits = bubble(
        schedule, plan.topology, micro_batches, recomputes=config.train.recompute == "full"
    )
    yield f"pipeline: {schedule}; each stage waits {waits:.0%} of a step for the others"
    if error := schedule_error(schedule, plan.topology, micro_batches):
        yield f"warning: {error}; change the accumulation, or set parallel.pipeline_schedule=gpipe"


def _memory_lines(plan: Plan, config: Run) -> Iterable[str]:
    train, parallel, precision = config.train, config.parallel, config.precision
    zero = f"ZeRO stage {parallel.zero_stage}" + (
        f" over {shard_ranks(config)} ranks" if shard_ranks(config) > 1 else ""
    )
    count = train.recompute_layers
    of_layers = "" if count is None else f" of the first {count} layers of a stage"
    yield (
        f"Memory of a rank at most, calculated, not measured (GiB = 2^30 bytes; weights"
        f" {precision.parameters}, gradients"
        f" {precision.reduction if has_low_gradients(config) else 'float32'},"
        f" {config.optimizer.name}'s state float32; {zero}; recompute"
        f" {train.recompute}{of_layers}):"
    )
    yield from table(
        ("stage", "ranks", "layers", "parameters", *plan.stages[0].memory.parts, "GiB"),
        _stage_rows(plan),
    )
    yield (
        "(loss: gradients that the loss computes at once; working: temporary memory of a pass;"
        " communication: buffers of messages"
        f"{'; gathered: weights of other ranks' if parallel.zero_stage else ''})"
    )
    if on_host := max(stage.memory.on_host for stage in plan.stages):
        yield (
            f"On the host a rank keeps {on_host / GIB:.2f} GiB of activations at most, in pinned"
            " memory (train.offload_activations)"
        )
    if plan.batch.accumulation == 1:
        yield "(with one micro batch a step, gradients take the room of activations as these go)"
    if config.backend == "mindspore":
        yield (
            "(activations and what follows as torch would keep them; MindSpore's graph decides"
            " for itself)"
        )


def _ramp_lines(config: Run) -> Iterable[str]:
    if config.train.rampup_batch_size is not None:
        yield f"batch ramp: {describe_ramp(config.batch_sizes)}; all figures are of the full batch"


def _room(plan: Plan, config: Run, device: Accelerator | None) -> list[str]:
    """Return a line on what the given memory leaves on the fullest rank, if memory is known.

    The memory is context.max_device_memory, in 2^30 bytes as both backends read it, or the
    device's.
    """
    limit = memory_limit(config, device)
    if limit is None:
        return []
    given = config.context.max_device_memory
    what = (
        f"context.max_device_memory={given}"
        if given is not None
        else f"{device.name if device else ''}, {limit / GIB:.1f} GiB"
    )
    room = limit - plan.peak
    if room > 0:
        return [f"fits: {what} leaves {room / GIB:.2f} GiB on the fullest rank"]
    return [
        f"does not fit: {what} is {-room / GIB:.2f} GiB short; raise model_parallel, pipeline_stage"
        " or zero_stage, or recompute more"
    ]


def _kernels_to_check(config: Run, device: Accelerator | None) -> Iterable[str]:
    """Say that MindSpore may have left the first Ascend (docs/ascend.md)."""
    if config.backend == "mindspore" and device is not None and device.name == FIRST_ASCEND:
        yield (
            "MindSpore's pages name only Atlas A2 and A3 servers; check in its release notes that"
            f" your version still has kernels for the {device.name}"
        )


RESERVED = 0.06
"""Part of a device's memory that the driver, the libraries and gaps between tensors take."""
RESERVED_AT_LEAST = 2.4 * GIB
"""Least of it, which weighs on cards below 40 GB. nvidia-smi showed so much beyond the plan on
V100s of 16 GB (OneFlow's report of May 2021, the median of 13 runs without a pipeline).
"""


def usable_memory(memory: float) -> float:
    """Return the bytes of an accelerator's memory that a rank may plan with."""
    return memory - max(RESERVED * memory, RESERVED_AT_LEAST)


def memory_limit(config: Run, device: Accelerator | None) -> float | None:
    """Return the bytes that a rank may use, or None if unknown.

    They are context.max_device_memory, or the device's memory without a reserve.
    """
    given = config.context.max_device_memory
    if given is not None:
        return float(given.removesuffix("GB")) * GIB
    return None if device is None else usable_memory(device.memory)


def _traffic_lines(plan: Plan) -> Iterable[str]:
    sent = {
        field.name: max(getattr(stage.traffic, field.name) for stage in plan.stages)
        for field in fields(Traffic)
    }
    text = ", ".join(f"{axis} {size / GIB:.3g}" for axis, size in sent.items() if size)
    yield (
        f"A rank sends in a step at most (GiB, ring algorithms): {text}"
        if text
        else "No rank sends anything"
    )


def _time_lines(plan: Plan, config: Run, device: Accelerator) -> Iterable[str]:
    time = time_of(plan, config, device)
    parts = ", ".join(
        f"{field.name} {part / time.total:.0%}"
        for field in fields(StepTime)
        if (part := getattr(time, field.name))
    )
    speed = plan.tokens_per_step / time.total
    yield (
        f"A step may take {time.total:.3g} s on {device.name}, {speed:,.0f} tokens/s (estimated"
        f" from peak rates, not measured): {parts}"
    )


_RANK = ("rank", "stage", "data", "tensor")
_PLACE = ("host", "device")
_SHOWN = (GroupKind.TENSOR, GroupKind.DATA, GroupKind.PIPELINE, GroupKind.EMBEDDING)


def _stage_rows(plan: Plan) -> Iterable[tuple[str, ...]]:
    size = plan.topology.data * plan.topology.tensor
    for place, stage in enumerate(plan.stages):
        sizes = stage.memory.parts.values()
        ranks = range(place * size, (place + 1) * size)
        numbers, layers = (
            " ".join(map(str, stage.stages)),
            " ".join(map(_ranks, _joined(stage.layers))),
        )
        yield (
            numbers,
            _ranks(ranks),
            layers,
            f"{stage.parameters:,}",
            *(f"{value / GIB:.2f}" for value in (*sizes, stage.memory.peak)),
        )


def _joined(parts: Sequence[range]) -> list[range]:
    """Merge ascending ranges that have no gap between them."""
    joined: list[range] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _rank_rows(
    topology: Topology, all_ranks: bool, places: Sequence[RankPlacement]
) -> Iterable[tuple[str, ...]]:
    world, cut = topology.world_size, _LISTED // 2
    shorten = world > _LISTED and not all_ranks
    for rank in chain(range(cut), (None,), range(world - cut, world)) if shorten else range(world):
        if rank is None:
            yield ("...",)
            continue
        at = topology.coordinates(rank)
        groups = (_ranks(topology.group(kind, rank)) for kind in _SHOWN)
        where = (places[rank].host, str(places[rank].device_id)) if places else ()
        yield str(rank), str(at.pipeline), str(at.data), str(at.tensor), *where, *groups


def _ranks(numbers: Sequence[int]) -> str:
    """Return ranks as ``0-7`` without gaps, ``0 2 .. 14`` with equal gaps, else ``0 2 6``."""
    if not numbers:
        return "-"
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1 > 0:
        return f"{first}-{last}"
    return f"{first} {numbers[1]} .. {last}" if len(numbers) > 4 else " ".join(map(str, numbers))


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return a table with columns aligned to the right."""
    cells = [head, *rows]
    widths = [
        max(len(row[column]) for row in cells if column < len(row)) for column in range(len(head))
    ]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        for row in cells
    ]

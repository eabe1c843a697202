"""Plan of a run before it starts: ranks, batch, memory and messages of each rank, and step time.

It is arithmetic on the config, without a framework or a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from common.accelerators import GIB, Accelerator
from common.cluster.places import RankPlacement
from common.errors import ConfigError
from common.parallel.batch import describe_ramp
from common.parallel.kernels import FIRST_ASCEND
from common.parallel.pipeline import bubble, schedule_error
from common.parallel.run import Run
from common.parallel.topology import GroupKind, Topology
from common.parallel.updates import describe_schedule, schedule_warnings
from common.planner.fitting import limit_name, memory_limit
from common.planner.memory import Memory, has_low_gradients, memory_of
from common.planner.timing import RANGES, StepTime, step_time, traffic_of
from common.resolve.derive import resolve_other
from common.weights.names import count_parameters, flops_per_token

_LISTED = 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Arithmetic of a run."""

    run: Run
    stages: tuple[Memory, ...]
    """By place on the pipeline axis."""

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return max(stage.peak for stage in self.stages)


def make_plan(run: Run) -> Plan:
    """Compute the plan of a run. Raises ConfigError if layers do not divide into stages."""
    return Plan(run=run, stages=tuple(memory_of(run, place) for place in range(run.topology.pipeline)))


def time_of(plan: Plan, device: Accelerator) -> StepTime:
    """Return the step time of the slowest rank."""
    times = (step_time(plan.run, device, place, memory) for place, memory in enumerate(plan.stages))
    return max(times, key=lambda time: time.total)


def describe_plan(
    plan: Plan,
    *,
    all_ranks: bool = False,
    places: Sequence[RankPlacement] = (),
    device: Accelerator | None = None,
    like: Likeness | None = None,
) -> str:
    """Return the plan as text: whether it fits, how long a step takes, and how that comes about.

    Stages that are alike share a line, and ranks are told by a formula. ``all_ranks`` lists all of
    them. places: of every rank in order, if known, to show host and device. device: the one whose
    step time to estimate. like: a measured run that scales the estimate.
    """
    topology = plan.run.topology
    traffic = [vars(traffic_of(plan.run, place)) for place in range(topology.pipeline)]
    sent = {axis: max(each[axis] for each in traffic) for axis in traffic[0]}
    sizes = ", ".join(f"{axis} {three_digits(size / GIB)}" for axis, size in sent.items() if size)
    lines = [
        _fit(plan, device),
        *(_time_lines(plan, device, like) if device is not None else ()),
        *(f"warning: {warning}" for warning in _warnings(plan.run, device)),
        *_run_lines(plan.run),
        "",
        *_memory_lines(plan, all_ranks),
        "",
        f"A rank sends in a step at most (GiB, ring algorithms): {sizes}" if sizes else "No rank sends anything",
    ]
    if all_ranks or places:
        lines += ["", *_rank_table(topology, all_ranks, places)]
    elif topology.world_size > 1:
        axes = {"stage": topology.pipeline, "data": topology.data, "tensor": topology.tensor}
        shown = {name: size for name, size in axes.items() if size > 1}
        terms = [f"{name} x {math.prod([*shown.values()][number + 1 :])}" for number, name in enumerate(shown)]
        groups = (f"{kind} {_ranks(group)}" for kind in [*GroupKind][:3] if len(group := topology.group(kind, 0)) > 1)
        lines += [
            f"ranks: {' + '.join(terms).removesuffix(' x 1')} (--all lists them)",
            f"groups of rank 0: {'; '.join(groups)}",
        ]
    return "\n".join(lines) + "\n"


def _fit(plan: Plan, device: Accelerator | None) -> str:
    """Return what the fullest rank needs of the memory that is given, if it is known."""
    peaks = [stage.peak / GIB for stage in plan.stages]
    most, least = max(peaks), min(peaks)
    where = (
        f" at place {peaks.index(most)} of the pipeline (least: place {peaks.index(least)}, {least:.1f})"
        if len(peaks) > 1
        else ""
    )
    limit = memory_limit(plan.run, device)
    if limit is None:
        ask = "" if device else "; --accelerator NAME tells whether it fits, and the time of a step"
        return f"needs: {most:.1f} GiB{where}{ask}"
    of = f"{most:.1f} of {limit / GIB:.1f} GiB{where}, {limit_name(plan.run, device)}"
    if plan.peak < limit:
        return f"fits: {of}"
    return (
        f"does not fit: {of}: {most - limit / GIB:.2f} GiB short; raise model_parallel,"
        " pipeline_stage or zero_stage, or recompute more"
    )


def _warnings(config: Run, device: Accelerator | None) -> Iterable[str]:
    """Yield what the engine, the schedule or a device has against the run."""
    if config.precision.float8 != "none":
        try:
            resolve_other(config, world_size=config.topology.world_size)
        except ConfigError as refusal:
            yield f"a training refuses what is planned here: {refusal}"
    if config.train.max_steps is not None:
        yield from schedule_warnings(config)
    schedule = config.parallel.pipeline_schedule
    if error := schedule_error(schedule, config.topology, config.train.accumulation_steps):
        yield f"{error}; change the accumulation, or set parallel.pipeline_schedule=gpipe"
    tensor, width = config.topology.tensor, config.sizes.hidden
    if device is not None and width // tensor % TILE:
        yield (
            f"model.hidden_size {width} / tensor {tensor} = {width // tensor} is no multiple of"
            f" {TILE}: products may take a quarter more time, which is not counted"
        )
    if device is not None and tensor > device.server_devices:
        yield (
            f"tensor parallel over {tensor} devices leaves a server of {device.server_devices}, and"
            " exchanges data in every layer"
        )
    if config.backend == "mindspore" and device is not None and device.name == FIRST_ASCEND:
        yield (  # docs/ascend.md
            "MindSpore's pages name only Atlas A2 and A3 servers; check in its release notes that"
            f" your version still has kernels for the {device.name}"
        )


TILE = 64
"""Widths that products are made for. 14400 / 8 = 1800 took 221 s a step, and 13824 / 8 = 1728, with
8 % fewer operations, 160 s (BigScience's chronicles of BLOOM).
"""


def _run_lines(config: Run) -> Iterable[str]:
    topology, train, window, stride = config.topology, config.train, config.model.seq_length, config.data.stride
    yield f"world: {topology}"
    yield (
        f"batch: global batch {train.global_batch_size} = micro batch {train.micro_batch_size} x data parallel"
        f" {config.parallel.data_parallel} x accumulation {train.accumulation_steps} samples;"
        f" {train.global_batch_size * window:,} tokens a step"
    )
    if config.train.rampup_batch_size is not None:
        yield f"batch ramp: {describe_ramp(config.batch_sizes)}; all figures are of the full batch"
    if stride is not None and stride < window:
        yield (
            f"windows: {window} tokens, one every {stride}: an epoch takes {window / stride:.2f}"
            " times the steps that it takes without overlap"
        )
    yield f"schedule: {describe_schedule(config.optimizer)}"
    yield (
        f"model: {count_parameters(config.model):,} parameters; vocabulary {config.model.vocab_size},"
        f" padded to {config.vocab_rows}"
    )
    if topology.pipeline > 1:
        schedule, is_full = config.parallel.pipeline_schedule, config.train.recompute == "full"
        waits = bubble(schedule, topology, train.accumulation_steps, recomputes=is_full)
        yield f"pipeline: {schedule}; each stage waits {_percent(waits)} of a step for the others"


def _percent(part: float) -> str:
    return f"{part:.1%}" if part < 0.1 else f"{part:.0%}"


def _memory_lines(plan: Plan, all_stages: bool) -> Iterable[str]:
    config = plan.run
    train, parallel, precision = config.train, config.parallel, config.precision
    zero = f"ZeRO stage {parallel.zero_stage}" + f" over {parallel.shards} ranks" * (parallel.shards > 1)
    count = train.recompute_layers
    of_layers = "" if count is None else f" of the first {count} layers of a stage"
    yield (
        f"Memory of a rank at most, calculated, not measured (GiB = 2^30 bytes; weights"
        f" {precision.parameters}, gradients"
        f" {precision.reduction if has_low_gradients(config) else 'float32'}, {config.optimizer.name}'s state float32;"
        f" {zero}; recompute {train.recompute}{of_layers}):"
    )
    yield from _stage_table(plan, all_stages)
    if all_stages:
        yield (
            "(loss: gradients that the loss computes at once; working: temporary memory of a pass;"
            " communication: buffers of messages; gathered: weights of other ranks)"
        )
    if on_host := max(stage.on_host for stage in plan.stages):
        yield (
            f"On the host a rank keeps {on_host / GIB:.2f} GiB of activations at most, in pinned"
            " memory (train.offload_activations)"
        )
    if train.accumulation_steps == 1 and all_stages:
        yield "(with one micro batch a step, gradients take the room of activations as these go)"
    if config.backend == "mindspore":
        yield ("(activations and what follows as torch would keep them; MindSpore's graph decides for itself)")


def three_digits(value: float) -> str:
    """Return a number with three digits, and no exponent above 1."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time_lines(plan: Plan, device: Accelerator, like: Likeness | None) -> Iterable[str]:
    time, factor = time_of(plan, device), like.factor if like else 1.0
    seconds = time.total * factor
    *ends, count = RANGES[device.family]
    low, high = (three_digits(seconds * end) for end in ((0.9, 1.1) if like else ends))
    speed, used = speed_and_mfu(plan.run, device, seconds)
    yield (
        f"time: {three_digits(seconds)} s a step ({low} to {high}), {speed:,.0f} tokens/s,"
        f" {three_digits(speed / plan.run.topology.world_size)} a device, MFU {used:.1%}, on {device.name}"
    )
    parts = sorted(((part / time.total, name) for name, part in vars(time).items()), reverse=True)
    yield "limited by: " + ", ".join(f"{name} {_percent(part)}" for part, name in parts if part)
    yield (
        f"(scaled by {factor:.2f}: {like.folder} took {three_digits(like.seconds)} s a step)"
        if like
        else f"(calculated, not measured; eight of ten of {count} published steps on"
        f" {device.family} are within the range)"
    )


def speed_and_mfu(run: Run, device: Accelerator, seconds: float) -> tuple[float, float]:
    """Return tokens per second, and the part of the devices' peak rate that a step of this time uses."""
    peak = device.single_flops if run.precision.compute == "float32" else device.half_flops
    speed = run.train.global_batch_size * run.model.seq_length / seconds
    return speed, speed * flops_per_token(run.model) / peak / run.topology.world_size


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """A run that measured what the plan estimates."""

    folder: str
    seconds: float
    """Of a step, measured."""
    factor: float
    """Measured by planned seconds."""


def _stage_table(plan: Plan, all_stages: bool) -> list[str]:
    """Return the memory of each place of the pipeline.

    Unless all are asked for, neighbours with as many parameters share a line, as a range where they
    differ, and columns that are 0.00 everywhere are left out.
    """
    topology, layers = plan.run.topology, plan.run.model.num_layers
    size = topology.data * topology.tensor
    parts = [
        name
        for name in plan.stages[0].parts
        if all_stages or any(stage.parts[name] / GIB >= 0.005 for stage in plan.stages)
    ]
    places = range(topology.pipeline)
    rows = []
    for _, group in groupby(places, None if all_stages else lambda at: plan.stages[at].parameters):
        here, ends = [*group], []
        for place in (here[0], here[-1]):
            stages, plan_here = topology.stages_of(place), plan.stages[place]
            sizes = [*(plan_here.parts[name] for name in parts), plan_here.peak]
            ends.append(
                (
                    " ".join(map(str, stages)),
                    _ranks(range(here[0] * size, (here[-1] + 1) * size)),
                    " ".join(_ranks(topology.layers_of_stage(stage, layers)) for stage in stages),
                    f"{plan_here.parameters:,}",
                    *(f"{part / GIB:.2f}" for part in sizes),
                )
            )
        rows.append(tuple(one if one == other else f"{one} .. {other}" for one, other in zip(*ends, strict=True)))
    return table(("stage", "ranks", "layers", "parameters", *parts, "GiB"), rows)


def _rank_table(topology: Topology, all_ranks: bool, places: Sequence[RankPlacement]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        groups = (_ranks(topology.group(kind, rank)) for kind in GroupKind)
        where = (places[rank].host, str(places[rank].device_id)) if places else ()
        rows.append((str(rank), str(at.pipeline), str(at.data), str(at.tensor), *where, *groups))
    if len(rows) > _LISTED and not all_ranks:
        rows[_LISTED // 2 : -_LISTED // 2] = [("...",)]
    where = ("host", "device") if places else ()
    return table(("rank", "stage", "data", "tensor", *where, *(f"{kind} group" for kind in GroupKind)), rows)


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
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in cells]

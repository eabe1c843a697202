"""Micro batch and recomputation that fit in memory by the plan, where a run has ``auto`` for them.

The fastest recomputation is taken by the plan's time of a step, each with the largest micro batch
that fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from common.accelerators import GIB, Accelerator, require_accelerator
from common.errors import ConfigError
from common.parallel.loss_rows import with_loss_rows
from common.parallel.ramp import micro_batches
from common.parallel.resolved_run import ResolvedRun
from common.parallel.topology import Topology
from common.planner.communication import traffic_of
from common.planner.memory import memory_of
from common.planner.plan import RESERVED
from common.planner.room import machine_memory
from common.planner.timing import step_time
from common.resolve.derive import with_micro_batch, with_recompute

RECOMPUTATIONS = ("none", "selective", "full")
"""Values of ``train.recompute``, from the most to the least memory."""
UNKNOWN_DEVICE = "A100"
"""Accelerator whose rates compare recomputations on a device without figures of its own."""

_Run = TypeVar("_Run", bound=ResolvedRun)


def choices(config: ResolvedRun) -> list[int]:
    """Return the micro batches that the run can have, in ascending order.

    Each divides every global batch over the data-parallel ranks. With a pipeline they leave at
    least as many micro batches as stages, if any does.
    """
    train, ranks = config.train, config.parallel.data_parallel
    found = []
    for size in micro_batches(train.global_batch_size, train.rampup_batch_size, ranks):
        with suppress(ConfigError):
            with_micro_batch(config, size)
            found.append(size)
    stages = config.parallel.pipeline_stage
    busy = [size for size in found if train.global_batch_size >= size * ranks * stages]
    return busy or found


def rank_memory(
    config: ResolvedRun, *, kind: str, device_memory: int | None, ranks: int
) -> float | None:
    """Return the bytes that a rank may use, or None if unknown.

    They are context.max_device_memory, else the device's memory, or on a CPU the machine's divided
    by its ``ranks``, without a reserve.
    """
    given = config.context.max_device_memory
    if given is not None:
        return float(given.removesuffix("GB")) * GIB
    there = machine_memory() if kind == "cpu" else device_memory
    shared = ranks if kind == "cpu" else 1
    return None if there is None else there / shared * (1 - RESERVED)


def with_fitting(config: ResolvedRun, device: Accelerator | None) -> ResolvedRun:
    """Return the run with what it leaves open chosen by the plan for an accelerator.

    Without one the memory is this machine's, if the run may be on its CPU. Where the memory is
    unknown, the micro batch is the smallest one.
    """
    train = config.train
    if not (train.micro_batch_is_auto or train.recompute_is_auto):
        return config
    on_cpu = device is None and config.device in ("auto", "cpu")
    memory = device.memory if device is not None else None
    limit = rank_memory(config, kind="cpu" if on_cpu else "", device_memory=memory, ranks=1)
    if limit is None and train.micro_batch_is_auto:
        config = with_micro_batch(config, train.micro_batch_size)
    return fitting_by_plan(config, limit, device=device, device_memory=memory)


def fitting_by_plan(
    config: _Run,
    limit: float | None,
    *,
    device: Accelerator | None = None,
    device_memory: int | None = None,
) -> _Run:
    """Return the run with micro batch and recomputation chosen, as far as it leaves them open.

    Its fullest rank stays within the limit by the plan, if that is possible. Without a limit
    nothing is recomputed. device: the accelerator that sets the times. device_memory: its bytes, on
    which the rows of the loss depend.
    """
    if not config.train.recompute_is_auto:
        return _with_largest(config, limit, device_memory)
    device = device or require_accelerator(UNKNOWN_DEVICE)
    best, seconds = None, float("inf")
    for mode in RECOMPUTATIONS:
        tried = _with_largest(with_recompute(config, mode), limit, device_memory)
        if limit is None:
            return tried
        if not _fits(tried, limit, device_memory):
            continue
        tried = _with_fewest_layers(tried, limit, device_memory)
        time = time_within(_on_device(tried, device_memory), device, limit)
        if time is not None and time < seconds:
            best, seconds = tried, time
    return tried if best is None else best


def _with_largest(config: _Run, limit: float | None, device_memory: int | None) -> _Run:
    if not config.train.micro_batch_is_auto:
        return config
    return with_micro_batch(config, largest_by_plan(config, limit, device_memory=device_memory))


def _with_fewest_layers(config: _Run, limit: float, device_memory: int | None) -> _Run:
    """Return the run with as few blocks of a stage that recompute as fit."""
    mode = config.train.recompute
    if mode == "none":
        return config
    topology, layers = config.topology, config.model.num_layers
    most = max(len(topology.layers_of_stage(each, layers)) for each in range(topology.stages))
    fewest = 1 + bisect_left(
        range(1, most),
        True,
        key=lambda count: _fits(with_recompute(config, mode, count), limit, device_memory),
    )
    return config if fewest == most else with_recompute(config, mode, fewest)


def largest_by_plan(
    config: ResolvedRun, limit: float | None, *, device_memory: int | None = None
) -> int:
    """Return the largest micro batch whose fullest rank stays within the limit by the plan.

    Without a limit it is the largest possible one, and where none fits the smallest. device_memory:
    of an accelerator, on which the rows of the loss depend.
    """
    sizes = choices(config)
    for size in reversed(sizes):
        if limit is None or _fits(with_micro_batch(config, size), limit, device_memory):
            return size
    return sizes[0]


def _fits(config: ResolvedRun, limit: float, device_memory: int | None) -> bool:
    tried = _on_device(config, device_memory)
    places = range(tried.topology.pipeline)
    return max(memory_of(tried, tried.topology, place).peak for place in places) <= limit


def _on_device(config: ResolvedRun, device_memory: int | None) -> ResolvedRun:
    return config if device_memory is None else with_loss_rows(config, device_memory)


def time_within(config: ResolvedRun, device: Accelerator, limit: float) -> float | None:
    """Return the seconds of a step.

    None if a rank needs more memory than the limit; infinity if its state by itself does.
    """
    topology = config.topology
    held = []
    for place in telling_places(topology):
        memory = memory_of(config, topology, place)
        if memory.peak > limit:
            return float("inf") if memory.state > limit else None
        held.append((place, memory, traffic_of(config, topology, place)))
    return step_time(config, topology, device, held).total


def telling_places(topology: Topology) -> Sequence[int]:
    """Return pipeline ranks that include the fullest and the slowest.

    With equally many layers per stage, ranks between the first and the last stage take equally
    long. Their memory grows or shrinks from one to the next.
    """
    places = range(topology.pipeline)
    return (
        places
        if topology.stage_layers is not None or len(places) < 5
        else (0, 1, len(places) - 2, len(places) - 1)
    )

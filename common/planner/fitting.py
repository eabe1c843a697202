"""The largest micro batch that fits in memory by the plan, for train.micro_batch_size=auto."""

from __future__ import annotations

from contextlib import suppress

from common.accelerators import GIB, Accelerator
from common.errors import ConfigError
from common.parallel.loss_rows import with_loss_rows
from common.parallel.ramp import micro_batches
from common.parallel.resolved_run import ResolvedRun
from common.planner.memory import memory_of
from common.planner.plan import RESERVED
from common.planner.room import machine_memory
from common.resolve.derive import with_micro_batch


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


def with_largest(config: ResolvedRun, device: Accelerator | None) -> ResolvedRun:
    """Return the run with the micro batch that fits by the plan, if it leaves it open.

    device: the accelerator; without it the memory is this machine's, if the run may be on its CPU.
    Where the memory is unknown, the micro batch is the smallest one.
    """
    train = config.train
    if not train.micro_batch_is_auto:
        return config
    on_cpu = device is None and config.device in ("auto", "cpu")
    memory = device.memory if device is not None else None
    limit = rank_memory(config, kind="cpu" if on_cpu else "", device_memory=memory, ranks=1)
    known = limit is not None
    size = largest_by_plan(config, limit, device_memory=memory) if known else train.micro_batch_size
    return with_micro_batch(config, size)


def largest_by_plan(
    config: ResolvedRun, limit: float | None, *, device_memory: int | None = None
) -> int:
    """Return the largest micro batch whose fullest rank stays within the limit by the plan.

    Without a limit it is the largest possible one, and where none fits the smallest. device_memory:
    of an accelerator, on which the rows of the loss depend.
    """
    sizes = choices(config)
    for size in reversed(sizes):
        tried = with_micro_batch(config, size)
        if device_memory is not None:
            tried = with_loss_rows(tried, device_memory)
        places = range(tried.topology.pipeline)
        peak = max(memory_of(tried, tried.topology, place).peak for place in places)
        if limit is None or peak <= limit:
            return size
    return sizes[0]

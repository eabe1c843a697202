"""Micro batch and recomputation that fit in memory by the plan, where a run has ``auto`` for them.

The fastest recomputation is taken by the plan's time of a step, each with the largest micro batch
that fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.accelerators import Accelerator, Hardware, find_accelerator, require_accelerator
from common.config.resolved import as_run
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.parallel.ramp import micro_batches
from common.parallel.run import Run
from common.parallel.topology import Topology
from common.planner.communication import traffic_of
from common.planner.memory import memory_of
from common.planner.plan import RESERVED, memory_limit
from common.planner.room import machine_memory
from common.planner.timing import step_time
from common.resolve.derive import resolve_other

RECOMPUTATIONS = ("none", "selective", "full")
"""Values of ``train.recompute``, from the most to the least memory."""
UNKNOWN_DEVICE = "A100"
"""Accelerator whose rates compare recomputations on a device without figures of its own."""


def is_open(config: RunConfig) -> bool:
    """Return whether a training leaves micro batch or recomputation to the plan."""
    return "auto" in (config.train.micro_batch_size, config.train.recompute)


def rank_memory(config: RunConfig, hardware: Hardware, *, ranks: int = 1) -> float | None:
    """Return the bytes that the plan may give a rank, or None if unknown.

    On a CPU without context.max_device_memory they are the memory of the machine divided by its
    ``ranks``, without a reserve.
    """
    if hardware.kind == "cpu" and config.context.max_device_memory is None:
        there = machine_memory()
        return None if there is None else there / ranks * (1 - RESERVED)
    return memory_limit(config, hardware)


def resolve_on(config: RunConfig, device: Accelerator | None, *, world_size: int) -> Run:
    """Resolve a training for an accelerator, with what it leaves open chosen by the plan.

    Without one the memory is this machine's, if the run may be on its CPU. Float8 in layouts whose
    training is refused is planned all the same.
    """
    scaling, parallel = config.precision.float8, config.parallel
    if scaling != "none" and (parallel.model_parallel > 1 or parallel.zero_stage):
        plain = as_run(RunConfig, config, precision={"float8": "none"})
        run = resolve_on(plain, device, world_size=world_size)
        return as_run(Run, run, precision={"float8": scaling})
    if device is not None:
        hardware = Hardware(kind="auto", name=device.name, memory=device.memory)
        limit = rank_memory(config, hardware)
    else:
        hardware = Hardware(kind=config.device)
        on_cpu = config.device in ("auto", "cpu")
        # the ranks of a launch here share this machine
        limit = rank_memory(config, Hardware(kind="cpu") if on_cpu else hardware, ranks=world_size)
    return Fitting(config, world_size, hardware, limit).fastest()


@dataclass(frozen=True)
class Fitting:
    """The search for a configuration. Each candidate is a configuration of its own, resolved for a
    device.
    """

    config: RunConfig
    world_size: int
    hardware: Hardware | None
    limit: float | None
    """Bytes that the fullest rank may need; None if they are not known."""

    def resolve(self, **train: Any) -> Run:
        """Resolve the configuration with other keys of train. Raises ConfigError."""
        return resolve_other(
            self.config, world_size=self.world_size, hardware=self.hardware, train=train
        )

    def fastest(self) -> Run:
        """Return the run with micro batch and recomputation chosen, as far as they are open.

        Where nothing fits they are those that need least. Where the memory is unknown, the micro
        batch is the smallest, and nothing is recomputed.
        """
        # MindSpore cannot recompute in pynative mode
        can = self.config.backend == "torch" or self.config.context.mode == "graph"
        if self.limit is None or not is_open(self.config):
            return self.resolve()
        if self.config.train.recompute != "auto" or not can:
            return self.largest()
        name = self.hardware.name if self.hardware is not None else None
        device = (name and find_accelerator(name)) or require_accelerator(UNKNOWN_DEVICE)
        best, seconds = None, float("inf")
        for mode in RECOMPUTATIONS:
            tried = self.largest(recompute=mode)
            if not self.fits(tried):
                continue
            tried = self._with_fewest_layers(tried)
            time = time_within(tried, device, self.limit)
            if time is not None and time < seconds:
                best, seconds = tried, time
        return tried if best is None else best

    def fits(self, run: Run) -> bool:
        """Tell whether the fullest rank stays within the limit by the plan."""
        peaks = (memory_of(run, run.topology, at).peak for at in range(run.topology.pipeline))
        return self.limit is None or max(peaks) <= self.limit

    def largest(self, **train: Any) -> Run:
        """Return the run with the largest micro batch that fits, or else the smallest one."""
        if self.config.train.micro_batch_size != "auto":
            return self.resolve(**train)
        run = self.resolve(**train)
        for run in self.choices(**train):
            if self.fits(run):
                break
        return run

    def choices(self, **train: Any) -> Iterator[Run]:
        """Yield the run with each micro batch that it can have, the largest first.

        Each divides every global batch over the data-parallel ranks. With a pipeline they leave at
        least as many micro batches as stages, if any does.
        """
        least = self.resolve(**train)
        full, ramp, ranks = (
            least.train.global_batch_size,
            least.train.rampup_batch_size,
            least.parallel.data_parallel,
        )
        sizes = micro_batches(full, ramp, ranks)
        busy = [size for size in sizes if full >= size * ranks * least.parallel.pipeline_stage]
        for size in reversed(busy or sizes):
            with suppress(ConfigError):
                yield self.resolve(**train, micro_batch_size=size)

    def _with_fewest_layers(self, run: Run) -> Run:
        """Return the run with as few blocks of a stage that recompute as fit."""
        train, topology, layers = run.train, run.topology, run.model.num_layers
        if train.recompute == "none":
            return run
        most = max(len(topology.layers_of_stage(each, layers)) for each in range(topology.stages))

        def with_layers(count: int) -> Run:
            return self.resolve(
                recompute=train.recompute,
                recompute_layers=count,
                micro_batch_size=train.micro_batch_size,
            )

        counts = range(1, most)
        fewest = 1 + bisect_left(counts, True, key=lambda count: self.fits(with_layers(count)))
        return run if fewest == most else with_layers(fewest)


def time_within(config: Run, device: Accelerator, limit: float) -> float | None:
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

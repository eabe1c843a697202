"""Micro batch and recomputation that fit in memory by the plan, where a run has ``auto`` for them.

The fastest recomputation is taken by the plan's time of a step, each with the largest micro batch that fits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.accelerators import Accelerator, Hardware, find_accelerator, require_accelerator
from common.config.resolved import as_run
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.parallel.batch import micro_batches
from common.parallel.run import Run
from common.planner.memory import memory_of
from common.planner.room import memory_limit
from common.planner.timing import step_time, traffic_of
from common.resolve.derive import resolve_other

RECOMPUTATIONS = ("none", "selective", "full")
"""Values of ``train.recompute``, from the most to the least memory."""


def is_open(config: RunConfig) -> bool:
    """Return whether a training leaves micro batch or recomputation to the plan."""
    return "auto" in (config.train.micro_batch_size, config.train.recompute)


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
        return Fitting.on(device, config, world_size).fastest()
    hardware = Hardware(kind=config.device)
    on_cpu = config.device in ("auto", "cpu")
    # the ranks of a launch here share this machine
    limit = memory_limit(config, Hardware(kind="cpu") if on_cpu else hardware, ranks=world_size)
    return Fitting(config, world_size, hardware, limit).fastest()


@dataclass(frozen=True)
class Fitting:
    """The search for a configuration. Each candidate is a configuration of its own, resolved for a device."""

    config: RunConfig
    world_size: int
    hardware: Hardware | None
    limit: float | None
    """Bytes that the fullest rank may need; None if they are not known."""

    @classmethod
    def on(cls, device: Accelerator, config: RunConfig, world_size: int) -> Fitting:
        hardware = Hardware(kind="auto", name=device.name, memory=device.memory)
        return cls(config, world_size, hardware, memory_limit(config, hardware))

    def resolve(self, **train: Any) -> Run:
        """Resolve the configuration with other keys of train. Raises ConfigError."""
        return resolve_other(self.config, world_size=self.world_size, hardware=self.hardware, train=train)

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
        # an A100's rates compare recomputations on a device without figures of its own
        device = (name and find_accelerator(name)) or require_accelerator("A100")
        best, seconds = None, math.inf
        for mode in RECOMPUTATIONS:
            tried = self.largest(recompute=mode)
            if not self.fits(tried):
                continue
            tried = self._with_fewest_layers(tried)
            if (time := self.seconds(tried, device)) < seconds:
                best, seconds = tried, time
        return tried if best is None else best

    def fits(self, run: Run) -> bool:
        """Tell whether the fullest rank stays within the limit by the plan."""
        peaks = (memory_of(run, place).peak for place in range(run.topology.pipeline))
        return self.limit is None or max(peaks) <= self.limit

    def largest(self, **train: Any) -> Run:
        """Return the run with the largest micro batch that fits, or else the smallest one.

        Each divides every global batch over the data-parallel ranks. With a pipeline they leave at
        least as many micro batches as stages, if any does.
        """
        run = self.resolve(**train)
        if self.config.train.micro_batch_size != "auto":
            return run
        full, ranks = run.train.global_batch_size, run.parallel.data_parallel
        sizes = micro_batches(full, run.train.rampup_batch_size, ranks)
        busy = [size for size in sizes if full >= size * ranks * run.parallel.pipeline_stage]
        for size in reversed(busy or sizes):
            with suppress(ConfigError):
                run = self.resolve(**train, micro_batch_size=size)
                if self.fits(run):
                    break
        return run

    def _with_fewest_layers(self, run: Run) -> Run:
        """Return the run with as few blocks of a stage that recompute as fit."""
        topology, layers = run.topology, run.model.num_layers
        if run.train.recompute == "none":
            return run
        most = max(len(topology.layers_of_stage(each, layers)) for each in range(topology.stages))
        keys = {key: getattr(run.train, key) for key in ("recompute", "micro_batch_size")}
        fewest = 1 + bisect_left(
            range(1, most), True, key=lambda count: self.fits(self.resolve(**keys, recompute_layers=count))
        )
        return run if fewest == most else self.resolve(**keys, recompute_layers=fewest)

    def seconds(self, run: Run, device: Accelerator) -> float:
        """Return the time of a step; infinity if a rank needs more memory than the limit."""
        places: Sequence[int] = range(run.topology.pipeline)
        slowest = 0.0
        if run.topology.stage_layers is None and len(places) > 4:
            # ranks between the first and the last stage take equally long, and their memory grows
            # or shrinks from one to the next
            places = (*places[:2], *places[-2:])
        for place in places:
            memory = memory_of(run, place)
            if self.limit is not None and memory.peak > self.limit:
                return math.inf
            time = step_time(run, device, place, memory, traffic_of(run, place))
            slowest = max(slowest, time.total)
        return slowest

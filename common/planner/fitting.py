"""Checks of a run against the available memory, before and after an allocation; micro batch and recomputation that
fit in it by the plan, where a run has ``auto`` for them.

The fastest recomputation is taken by the plan's time of a step, each with the largest micro batch that fits.
"""

from __future__ import annotations

import errno
import math
import re
import resource
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.accelerators import GIB, Accelerator, Hardware, find_accelerator, require_accelerator
from common.cluster.environment import ALONE, Process
from common.config.resolved import as_run
from common.config.schema import RunConfig
from common.device import sees_accelerator
from common.errors import ConfigError
from common.log import LOG
from common.parallel.batch import divisors
from common.parallel.run import Run
from common.planner.memory import memory_of
from common.planner.timing import step_time
from common.resolve.derive import resolve_other

HOPELESS = 4
"""Factor by which a plan must exceed the memory to be rejected.

Activations are an estimate, and no error of the estimate is this large.
"""


def machine_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory and swap that this machine (or container) allows."""
    amounts: list[int] = [psutil.virtual_memory().total + psutil.swap_memory().total]
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # another version of cgroups, or "max"
            amounts.append(int((root / name).read_text(encoding="utf-8")))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        amounts.append(limit)
    return min(amounts)


RESERVED = 0.06
"""Part of a device's memory that the driver, the libraries and gaps between tensors take."""
MIN_RESERVED = 2.4 * GIB
"""Least of it, which weighs on cards below 40 GB. nvidia-smi showed so much beyond the plan on
V100s of 16 GB (OneFlow's report of May 2021, the median of 13 runs without a pipeline).
"""


def usable_memory(memory: float) -> float:
    """Return the bytes of an accelerator's memory that a rank may plan with."""
    return memory - max(RESERVED * memory, MIN_RESERVED)


def memory_limit(config: RunConfig, device: Accelerator | Hardware | None, *, ranks: int = 1) -> float | None:
    """Return the bytes that the plan may give a rank, or None if unknown.

    They are the device's memory without a reserve, or context.max_device_memory if that is less. On
    a CPU they are the machine's, which its ``ranks`` share.
    """
    most = config.context.most_bytes
    if isinstance(device, Hardware) and device.kind == "cpu":
        return machine_memory() / ranks * (1 - RESERVED) if most is None else most
    known = None if device is None or device.memory is None else usable_memory(device.memory)
    return min((limit for limit in (most, known) if limit is not None), default=None)


def limit_name(config: RunConfig, device: Accelerator | None) -> str:
    """Return what sets the ``memory_limit``: the key, or the name of the device."""
    if device is None or memory_limit(config, device) == config.context.most_bytes:
        return f"context.max_device_memory={config.context.max_device_memory}"
    return device.name


def check_memory(config: Run, process: Process = ALONE, *, training: bool = False) -> None:
    """Compare the plan's memory with that of the run's device, before anything is allocated.

    Warns on rank 0 if the plan exceeds it, and raises ConfigError if the run cannot fit. On a CPU
    the memory is the machine's, which the ranks of a host share. A checkpoint is written from a
    copy of weights and optimizer state there.
    """
    hardware, topology = config.hardware, config.topology
    on_cpu = hardware is not None and hardware.kind == "cpu"
    there = machine_memory() if on_cpu else None if hardware is None else hardware.memory
    if there is None:
        return
    place = topology.coordinates(process.rank % topology.world_size).pipeline
    ranks = min(process.local_world_size, topology.world_size) if on_cpu else 1
    memory = memory_of(config, place)
    certain = ranks * (memory.weights + (memory.optimizer if training else 0))
    likely = ranks * memory.peak + on_cpu * certain if training else certain
    free = psutil.virtual_memory().available if on_cpu else math.inf
    has = f"{'this machine' if on_cpu else 'the device'} has {gibibytes(there)}"
    who = f"{ranks} ranks need" if ranks > 1 else "a rank needs"
    part = "weights and optimizer state" if training else "weights"
    by_plan = f"{who} {gibibytes(likely)} by the plan"
    if certain > there:
        said = f"the run does not fit: {who} {gibibytes(certain)} for its {part}, but {has};"
    elif likely > there:
        certainty = "does not" if likely > HOPELESS * there else "may not"
        said = f"the run {certainty} fit: {by_plan}, but {has};"
    elif likely > free:
        said = (
            f"memory is short: {by_plan}, and {gibibytes(free)} of this machine's"
            f" {gibibytes(there)} are free; end other programs, or"
        )
    else:
        return
    message = f"{said} {advice(config, training=training, place=place)}"
    if certain > there or likely > HOPELESS * there:
        raise ConfigError(message)
    if process.rank == 0:
        LOG.warning(message)


def fits_machine(config: Run, peak: int, root: Path = Path("/")) -> str | None:
    """Return a line for the plan if a rank on a CPU needs more than this machine has, else None."""
    there = machine_memory(root)
    if config.device not in ("auto", "cpu") or (config.device == "auto" and sees_accelerator(root)) or peak <= there:
        return None
    return (
        f"does not fit this machine: a rank needs {gibibytes(peak)}, and there are {gibibytes(there)}; {advice(config)}"
    )


def out_of_memory(error: BaseException, config: Run, *, rank: int = 0, training: bool = False) -> str | None:
    """Return the message for a failed allocation, and None for any other error.

    It names the requested size, the plan's size, the machine's memory and remedies.
    """
    asked = asked_for(error)
    if asked is None:
        return None
    place = config.topology.coordinates(rank).pipeline
    memory = memory_of(config, place)
    parts = ", ".join(f"{name} {gibibytes(size)}" for name, size in memory.parts.items() if size)
    plan = f"by the plan a rank that trains holds {gibibytes(memory.peak)} at most ({parts})"
    has = f"; this machine has {gibibytes(machine_memory())}"
    helps = advice(config, training=training, place=place)
    return f"out of memory: {asked}; {plan}{has}. {helps}"


_WORDS = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory"
    r"|memory is(n't| not) enough|alloc(ate|ation)?\b.*fail|bad_alloc"
    r"|Storage size calculation overflowed|larger than the maximum possible size"
    r"|Maximum allowed dimension exceeded|Invalid buffer size",
    re.IGNORECASE,
)


def asked_for(error: BaseException) -> str | None:
    """Return the size that a failed allocation requested, in the library's words, else None."""
    text = next((line.strip() for line in str(error).splitlines() if _WORDS.search(line)), "")
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    lacking = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (named or lacking or (isinstance(error, RuntimeError | ValueError) and text)):
        return None
    size = re.search(r"tried to allocate (\d+) bytes", text)
    if size:
        return f"{gibibytes(int(size[1]))} at once were asked for"
    return (text or str(error).partition("\n")[0].strip() or "the system gave no more")[:200].rstrip(". ")


def advice(config: Run, *, training: bool = True, place: int = 0) -> str:
    """Return what to change, with the current values and what the plan says that each frees.

    place: pipeline stage of the rank that has no room.
    """
    train, parallel = config.train, config.parallel
    if not training:
        return "lower evaluation.batch_size or predict.batch_size, or use a machine with more memory"
    wishes = []
    if train.micro_batch_size > 1:
        size = max(n for n in divisors(train.micro_batch_size) if n < train.micro_batch_size)
        fewer = {"micro_batch_size": size, "accumulation_steps": None}
        freed = _freed(config, place, f"to {size} ", train=fewer)
        wishes.append(f"lower train.micro_batch_size (now {train.micro_batch_size}){freed}")
    if train.accumulation_steps > 10_000:
        wishes.append(f"lower train.global_batch_size (now {train.global_batch_size})")
    if train.recompute != "full" or train.recompute_layers is not None:
        freed = _freed(config, place, train={"recompute": "full", "recompute_layers": None})
        wishes.append(f"set train.recompute=full{freed}")
    stage = parallel.zero_stage + 1
    can_split = stage < 4 and parallel.data_parallel > 1
    split = {"zero_stage": stage}
    freed = _freed(config, place, f"to {stage} ", parallel=split) if can_split else ""
    wishes.append(
        f"split the state over ranks with parallel.zero_stage (now {parallel.zero_stage}){freed},"
        " model_parallel or pipeline_stage"
    )
    return f"{', '.join(wishes)}, or use a smaller model; --run_mode plan shows what each part takes"


def _freed(config: Run, place: int, to: str = "", **changes: Any) -> str:
    """Return what the plan's peak loses by changes, and nothing if that does not help or fit."""
    ranks, hardware = config.topology.world_size, config.hardware
    try:
        tried = resolve_other(config, world_size=ranks, hardware=hardware, **changes)
    except ConfigError:
        return ""
    now, then = (memory_of(run, place).peak for run in (config, tried))
    less = now - then
    return f" {to}(frees {gibibytes(less)})" if less >= GIB / 100 else ""


def gibibytes(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


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
        sizes = run.batch_sizes.micro_batches(ranks)
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
            slowest = max(slowest, step_time(run, device, place, memory).total)
        return slowest

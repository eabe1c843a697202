"""Whether a run fits the memory that is there: before anything is allocated, and what to say when
an allocation has failed.
"""

from __future__ import annotations

import errno
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from common.accelerators import GIB
from common.cluster.environment import Process
from common.device import Device
from common.errors import ConfigError
from common.log import LOG
from common.parallel.resolved_run import ResolvedRun
from common.planner.memory import Memory, memory_of

HOPELESS = 4
"""Activations are an estimate. A plan that asks for this many times the memory cannot fit by any
error of it.
"""


def machine_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory and swap that processes of this machine (or container) may take; None where
    the system does not say.
    """
    amounts: list[int] = []
    try:
        lines = dict(
            line.split(":", 1)
            for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
            if ":" in line
        )
        amounts.append(
            sum(
                int(lines[name].split()[0]) * 1024
                for name in ("MemTotal", "SwapTotal")
                if name in lines
            )
        )
    except (OSError, ValueError):
        return None
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            amounts.append(int((root / name).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        amounts.append(limit)
    return min(amounts)


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the ranks of one memory take. certain: allocated for sure; likely: by the plan's
    estimate, at most at once.
    """

    certain: int
    likely: int
    ranks: int = 1


def need_of(config: ResolvedRun, place: int, ranks: int, *, training: bool) -> Need:
    """Of so many ranks like that of this pipeline place."""
    memory = _memory(config, place)
    certain = memory.weights + (memory.optimizer if training else 0)
    return Need(
        certain=certain * ranks, likely=(memory.peak if training else certain) * ranks, ranks=ranks
    )


def _memory(config: ResolvedRun, place: int) -> Memory:
    return memory_of(config, config.topology, place)


def check_room(
    config: ResolvedRun,
    *,
    kind: str,
    device_memory: int | None,
    rank: int = 0,
    ranks: int = 1,
    training: bool = False,
) -> str | None:
    """Before anything is allocated. Returns a warning where the plan is above what is there. Raises
    ConfigError where it cannot fit.

    kind, device_memory: of the device; on a CPU the memory is the machine's. ranks: of this host,
    which share a CPU's memory.
    """
    on_cpu = kind == "cpu"
    there = machine_memory() if on_cpu else device_memory
    if there is None:
        return None
    place = config.topology.coordinates(rank).pipeline
    need = need_of(config, place, ranks if on_cpu else 1, training=training)
    has = f"this machine has {gibibytes(there)}" if on_cpu else f"the device has {gibibytes(there)}"
    who = f"{need.ranks} ranks need" if need.ranks > 1 else "a rank needs"
    helps = advice(config, training=training)
    if need.certain > there:
        part = "weights and optimizer state" if training else "weights"
        raise ConfigError(
            f"the run does not fit: {who} {gibibytes(need.certain)} for {part} alone, and {has};"
            f" {helps}"
        )
    if need.likely > HOPELESS * there:
        raise ConfigError(
            f"the run does not fit: {who} {gibibytes(need.likely)} by the plan, and {has}; {helps}"
        )
    if need.likely > there:
        return (
            f"the run may not fit: {who} {gibibytes(need.likely)} by the plan, and {has}; {helps}"
        )
    return None


def check_memory(
    config: ResolvedRun, process: Process, device: Device, *, training: bool = False
) -> None:
    """Compare the plan's memory with what is there, before anything is allocated.

    Warns on rank 0. Raises ConfigError where the run cannot fit.
    """
    ranks = config.topology.world_size
    warning = check_room(
        config,
        kind=device.kind,
        device_memory=device.total_memory(),
        rank=process.rank % ranks,
        ranks=min(process.local_world_size, ranks),
        training=training,
    )
    if warning is not None and process.rank == 0:
        LOG.warning(warning)


def fits_machine(config: ResolvedRun, peak: int, root: Path = Path("/")) -> str | None:
    """A line of the plan for a run on a CPU, where a rank is more than this machine holds; None
    where it fits or runs elsewhere.
    """
    accelerators = [*(root / "dev").glob("davinci[0-9]*"), *(root / "dev").glob("nvidia[0-9]*")]
    there = machine_memory(root)
    if (
        config.device not in ("auto", "cpu")
        or (config.device == "auto" and accelerators)
        or there is None
        or peak <= there
    ):
        return None
    return (
        f"does not fit this machine: a rank needs {gibibytes(peak)}, and there are"
        f" {gibibytes(there)}; {advice(config)}"
    )


def out_of_memory(
    error: BaseException, config: ResolvedRun, *, rank: int = 0, training: bool = False
) -> str | None:
    """The message for a failed allocation: what was asked for, what the plan computes, what the
    machine has, what helps. None for any other error.
    """
    asked = asked_for(error)
    if asked is None:
        return None
    place = config.topology.coordinates(rank).pipeline
    memory = _memory(config, place)
    parts = ", ".join(f"{name} {gibibytes(size)}" for name, size in memory.parts.items() if size)
    plan = f"by the plan a rank that trains holds {gibibytes(memory.peak)} at most ({parts})"
    there = machine_memory()
    has = f"; this machine has {gibibytes(there)}" if there is not None else ""
    return f"out of memory: {asked}; {plan}{has}. {advice(config, training=training)}"


_WORDS = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory"
    r"|memory is(n't| not) enough|alloc(ate|ation)?\b.*fail|bad_alloc"
    r"|Storage size calculation overflowed|larger than the maximum possible size"
    r"|Maximum allowed dimension exceeded|Invalid buffer size",
    re.IGNORECASE,
)


def asked_for(error: BaseException) -> str | None:
    """What an allocation that has failed asked for, in the words of the library; None where the
    error is another one.
    """
    text = next((line.strip() for line in str(error).splitlines() if _WORDS.search(line)), "")
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    lacking = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (named or lacking or (isinstance(error, RuntimeError | ValueError) and text)):
        return None
    size = re.search(r"tried to allocate (\d+) bytes", text)
    if size:
        return f"{gibibytes(int(size[1]))} at once were asked for"
    return (text or str(error).partition("\n")[0].strip() or "the system gave no more")[
        :200
    ].rstrip(". ")


def advice(config: ResolvedRun, *, training: bool = True) -> str:
    """What to change, with the values that are set now."""
    train, parallel = config.train, config.parallel
    if not training:
        return (
            "lower evaluation.batch_size or predict.batch_size, or use a machine with more memory"
        )
    wishes = (
        [f"lower train.micro_batch_size (now {train.micro_batch_size})"]
        if (train.micro_batch_size) > 1
        else []
    )
    wishes += (
        [f"lower train.global_batch_size (now {train.global_batch_size})"]
        if (train.accumulation_steps) > 10_000
        else []
    )
    wishes += ["set train.recompute=full"] if train.recompute != "full" else []
    wishes += [
        f"split the state over ranks with parallel.zero_stage (now {parallel.zero_stage}),"
        " model_parallel or pipeline_stage"
    ]
    return (
        f"{', '.join(wishes)}, or take a smaller model; --run_mode plan shows what each part takes"
    )


def gibibytes(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"

"""Interface of any device, its number, and facts about this machine's devices, processor and memory."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from common.cluster.environment import Process
from common.config.schema import RunConfig
from common.errors import ConfigError, DeviceError


class Device(Protocol):
    """What ``common`` asks of a device of either backend; all else stays inside the backend."""

    @property
    def kind(self) -> str:
        """Kind of device: cpu, cuda or npu."""

    @property
    def name(self) -> str:
        """Name of the device in the framework or the operating system."""

    def peak_flops(self, float_name: str) -> float:
        """Return the peak FLOP/s of matrix products in this type; 0 if unknown, as for every CPU."""

    def peak_memory(self) -> int:
        """Most bytes held so far."""

    def total_memory(self) -> int | None:
        """Bytes of the device's own memory; None on a CPU, and if the framework does not report it."""


def missing_for_kernels() -> str | None:
    """Return what Triton, which generates kernels for GPUs, lacks here: a C compiler or Python's
    headers (triton 3.7.1, runtime/build.py). None if it lacks neither.
    """
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    if not any(shutil.which(name) for name in compilers if name):
        return "C compiler"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.is_file() else str(header)


def device_index(config: RunConfig, process: Process) -> int:
    """Return the number of the process's device on this machine.

    It is the one for which the process was started, else context.device_id. Raises ConfigError.
    """
    written = config.context.device_id
    started_for = process.device_id
    if started_for is None and process.world_size > 1:
        started_for = process.local_rank
    if started_for is None:
        return written
    if written not in (0, started_for):
        raise ConfigError(
            f"context.device_id={written}, but rank {process.rank} was started for device"
            f" {started_for}; leave the key out"
        )
    return started_for


def processor_name() -> str:
    """Return the operating system's name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_resident_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def keep_freed_memory() -> None:
    """Make glibc reuse big blocks instead of returning them to the system.

    Otherwise each step faults its activations in again. Measured on 2 cores with the tiny config:
    1602 instead of 1285 tokens/s in torch, for 30 % more resident memory; about 8 % in MindSpore.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-4, 0)  # M_MMAP_MAX of malloc.h
        mallopt(-1, -1)  # M_TRIM_THRESHOLD
        mallopt(-2, 2**28)  # M_TOP_PAD


def sees_ascend(root: Path = Path("/")) -> bool:
    """Tell whether this host has an Ascend, by its device files."""
    return any((root / "dev").glob("davinci[0-9]*"))


def sees_accelerator(root: Path = Path("/")) -> bool:
    """Tell whether this host has an Ascend or a GPU, by its device files."""
    return sees_ascend(root) or any((root / "dev").glob("nvidia[0-9]*"))


@contextmanager
def naming_auto(config: RunConfig, kind: str, missing: str) -> Iterator[None]:
    """Explain an error that follows from ``auto`` having chosen ``cpu``.

    missing: the device that was not found, such as "Ascend".
    """
    try:
        yield
    except (ConfigError, DeviceError) as error:
        if config.device != "auto" or kind != "cpu":
            raise
        raise type(error)(
            f"device=auto chose cpu because no {missing} was found (if this host has one,"
            f" device={_WANTED[config.backend]} reports why), and the CPU does not support this: {error}"
        ) from None


_WANTED = {"torch": "cuda or device=npu", "mindspore": "npu"}


def check_device_id(config: RunConfig, kind: str) -> None:
    """Reject the number of a device whose kind has no numbers. Raises ConfigError."""
    if kind == "cpu" and config.context.device_id:
        raise ConfigError(f"context.device_id={config.context.device_id}: there is one CPU, number 0; leave it out")

"""The device of a run, and MindSpore's context."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from common.accelerators import accelerator_flops, find_accelerator
from common.cluster.environment import ALONE, Process
from common.device import (
    check_device_id,
    device_index,
    keep_freed_memory,
    naming_auto,
    peak_resident_bytes,
    processor_name,
)
from common.errors import ConfigError, DeviceError
from common.parallel.kernels import FIRST_ASCEND
from common.parallel.run import Run
from common.resolve.engine_checks import check_mindspore
from common.resolve.vendor_settings import mindspore_context

DTYPES = {"float32": ms.float32, "bfloat16": ms.bfloat16, "float16": ms.float16}

_TARGETS = {"cpu": "CPU", "cuda": "GPU", "npu": "Ascend"}


@dataclass(frozen=True, kw_only=True)
class MindSporeDevice:
    """See ``common.device.Device``."""

    kind: str
    index: int
    name: str

    def supports(self, float_name: str) -> bool:
        """MindSpore has no bfloat16 matrix product on a CPU, and the first Ascend 910 has none."""
        accelerator = find_accelerator(self.name)
        return float_name != "bfloat16" or (
            self.kind == "npu" and (accelerator is None or accelerator.name != FIRST_ASCEND)
        )

    @property
    def native_kernels(self) -> bool:
        """Whether there are kernels for gelu and keyed dropout; a CPU's gelu takes ten times as
        long as its formula written out.
        """
        return self.kind == "npu"

    @property
    def native_collectives(self) -> bool:
        """Whether groups have all of MindSpore's collective primitives; a CPU's have only AllReduce."""
        return self.kind != "cpu"

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as one graph, or as it is in PyNative mode."""
        if ms.get_context("mode") != ms.GRAPH_MODE:
            return function
        # ms.jit would say O0 to the compiler, whatever the context says
        level = (ms.get_context("jit_config") or {}).get("jit_level", "O0")
        compiled: Callable[..., Any] = ms.jit(function, jit_level=level)
        return compiled

    def peak_flops(self, float_name: str) -> float:
        return 0.0 if self.kind == "cpu" else accelerator_flops(self.name, float_name)

    def synchronize(self) -> None:
        if self.kind != "cpu":
            ms.runtime.synchronize()

    def peak_memory(self) -> int:
        if self.kind != "cpu":
            return int(ms.runtime.max_memory_allocated())
        return peak_resident_bytes()

    def total_memory(self) -> int | None:
        if self.kind == "cpu":
            return None
        size = getattr(ms.hal.get_device_properties(self.index), "total_memory", 0)
        if size:
            return int(size)
        # 0 until the first operator (mindspore/hal/device.py, get_device_properties)
        accelerator = find_accelerator(self.name)
        return None if accelerator is None else accelerator.memory

    def seed(self, seed: int) -> None:
        ms.set_seed(seed % 2**32)


def open_device(config: Run, process: Process = ALONE, *, lengths_vary: bool = False) -> MindSporeDevice:
    """The device of a process, checked against the config, and MindSpore's context set. Raises
    ConfigError or DeviceError.

    lengths_vary: as for torch's device; it makes no difference here.
    """
    device = select_device(config.device, index=device_index(config, process), threads=config.runtime.threads)
    check_support(config, device)
    if os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1":
        # MindSpore 2.10 numbers graphs in the order in which a process needs them, and takes the cached graph of that
        # number. A run that validates first would validate with the training step.
        raise ConfigError(
            "MS_COMPILER_CACHE_ENABLE=1: MindSpore takes cached graphs by their number, not by what"
            " they compute, so results may be of another function; unset it"
        )
    settings = mindspore_context(config)
    if "save_graphs_path" in settings:
        path = Path(settings["save_graphs_path"])
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"context.save_graphs_path={path}: cannot be made: {error.strerror}; choose another folder"
            ) from None
    ms.set_recursion_limit(settings.pop("max_call_depth"))  # set_context warns of it
    ms.set_context(**settings)
    if config.context.max_device_memory:
        _limit_memory(config.context.max_device_memory)
    # it may be set once in a process
    if config.train.deterministic and ms.get_context("deterministic") != "ON":
        ms.set_deterministic(True)
    return device


def select_device(kind: str, *, index: int = 0, threads: int | None = None) -> MindSporeDevice:
    """The device asked for; ``auto`` takes an Ascend if this MindSpore is built for one and sees it.

    Raises DeviceError when it is not there, saying why as far as MindSpore tells.
    """
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        raise ConfigError(
            f"backend=mindspore: MindSpore {ms.__version__} fails with numpy {np.__version__}; pip"
            " install numpy==1.26.4"
        )
    if kind == "auto":
        kind = "npu" if _available("npu") else "cpu"
    if not _available(kind):
        raise DeviceError(
            f"device={kind}: this MindSpore {ms.__version__} has no {_TARGETS[kind]} device; use device=cpu, or check"
            f" that this is MindSpore's {_TARGETS[kind]} build, its driver is loaded and the device is seen"
        )
    if kind == "cpu":
        keep_freed_memory()
    ms.set_device(_TARGETS[kind], 0 if kind == "cpu" else index)
    ms.set_context(mode=ms.GRAPH_MODE)
    if threads is not None:
        ms.device_context.cpu.op_tuning.threads_num(threads)
    name = processor_name() if kind == "cpu" else str(ms.hal.get_device_name(index))
    return MindSporeDevice(kind=kind, index=index, name=name)


def check_support(config: Run, device: MindSporeDevice) -> None:
    """Refuse what this device cannot do. Raises ConfigError or DeviceError."""
    with naming_auto(config, device.kind, "Ascend"):
        check_device_id(config, device.kind)
        check_mindspore(config, device.kind)
        if device.kind == "cpu" and (config.context.max_device_memory or config.context.enable_graph_kernel):
            raise ConfigError(
                "context.max_device_memory and context.enable_graph_kernel are for accelerators;"
                " leave them out on a CPU"
            )
        for part, float_name in config.precision.model_dump(exclude={"float8", "float8_head"}).items():
            if not device.supports(float_name):
                raise DeviceError(
                    f"precision.{part}={float_name}: MindSpore cannot on {device.name}; use"
                    " float32, or float16 with dynamic loss scale"
                )


@cache
def _limit_memory(size: str) -> None:
    """Limit the memory of the device, which may be done once in a process."""
    ms.runtime.set_memory(max_size=size)


def _available(kind: str) -> bool:
    try:
        return bool(getattr(ms.device_context, _TARGETS[kind].lower()).is_available())
    except (ValueError, RuntimeError, TypeError):
        return False

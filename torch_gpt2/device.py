"""The device of a run. The words cuda and npu appear in no other file of this package."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.accelerators import accelerator_flops
from common.cluster.environment import ALONE, Process
from common.device import (
    check_device_id,
    device_index,
    keep_freed_memory,
    missing_for_kernels,
    naming_auto,
    peak_resident_bytes,
    processor_name,
)
from common.errors import ConfigError, DeviceError
from common.log import LOG
from common.parallel.run import Run
from common.paths import require_package
from torch_gpt2.private_api import has_adam_kernel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_COMMUNICATION = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

_CANN = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Set by CANN's set_env.sh."""


_CAPTURING = Lock()
"""A process makes one graph at a time."""


def attention_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask (..., T, K) that attention takes, given which keys a query sees, bool.

    It is added to scores of this type: 0, or -inf. torch would make it of a bool mask in every
    block. Ascend's kernel takes none but bool (op-plugin, ScaledDotProductAttentionKernelNpuOpApi).
    """
    if seen.device.type == "npu":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def wide_type(device: torch.device) -> torch.dtype:
    """Return the type of the few numbers of a step, such as its loss: float64, on an NPU float32.

    torch_npu makes float32 of a cast to float64 (csrc/aten/common/ToKernelNpu.cpp), and many of
    Ascend's operators do not take it.
    """
    return torch.float32 if device.type == "npu" else torch.float64


@dataclass(frozen=True, kw_only=True)
class TorchDevice:
    """See ``common.device.Device``. ``module`` is torch's namespace of this kind of device."""

    kind: str
    index: int
    name: str
    module: Any = field(repr=False)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def communication_backend(self) -> str:
        return _COMMUNICATION[self.kind]

    @property
    def fused_optimizer(self) -> bool:
        """Whether torch.optim's fused kernels run here and the device can skip a step of theirs.

        Ascend has only that of AdamW, which ignores the flag that skips.
        """
        return self.kind != "npu"

    @cached_property
    def adam_kernel(self) -> bool:
        """Whether a kernel computes Adam's update of a tensor that only the host can skip: from
        the Atlas A2 on, where a probe finds it.
        """
        return (
            self.kind == "npu"
            and self.supports("bfloat16")  # the first Ascend 910 has neither
            and has_adam_kernel(self.torch_device)
        )

    @property
    def compiles(self) -> bool:
        """Whether torch.compile generates fast kernels here, which are Triton's."""
        return self.kind == "cuda" and importlib.util.find_spec("triton") is not None and missing_for_kernels() is None

    @property
    def runs_ahead(self) -> bool:
        """Whether calls return before the device has computed. Reading a number then makes the host
        wait for the device, and afterwards the device for the host.
        """
        return self.kind != "cpu"

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host in pinned memory, from which the device copies without the
        host. Any thread may call it.
        """
        if self.kind == "cpu":
            return tensor
        self.module.set_device(self.index)  # a new thread has the first device
        return tensor.pin_memory()

    def send(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device. The host does not wait for an accelerator."""
        return self.pin(tensor).to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to copy a tensor to the host; the function that is returned waits for it."""
        if self.kind == "cpu":
            return lambda: tensor
        place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        place.copy_(tensor, non_blocking=True)
        copied = self.mark()

        def wait() -> Tensor:
            copied()
            return place

        return wait

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for what the device has been given so far. Any thread may call it."""
        if self.kind == "cpu":
            return lambda: None
        event = self.module.Event()
        event.record()

        def wait() -> None:
            self.module.set_device(self.index)  # a new thread has the first device
            event.synchronize()

        return wait

    def moment(self) -> Any:
        """Return an event at which the device has computed what it has been given so far. Those of
        two moments know the milliseconds between them: ``first.elapsed_time(second)``.
        """
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def graph_memory(self) -> Any:
        """Return the memory that graphs share which live equally long and run in turns."""
        return self.module.graph_pool_handle() if self.kind == "cuda" else None

    @cached_property
    def _stream_aside(self) -> Any:
        """Stream for captures. cuBLAS keeps memory for each stream that it has seen."""
        return self.module.Stream()

    def capture(self, step: Callable[[], Tensor], memory: Any) -> Callable[[], Tensor]:
        """Return ``step`` as a CUDA graph, or as it is on other devices.

        It works on the same tensors in every call, and repeating it with the same input changes
        nothing. Its result lives until the next call of a step with the same ``memory``.
        """
        if self.kind != "cuda":
            return step
        with _CAPTURING:
            current, aside = self.module.current_stream(), self._stream_aside
            aside.wait_stream(current)
            with self.module.stream(aside):
                step()  # what libraries allocate or choose at first must not be in the graph
            current.wait_stream(aside)
            graph = self.module.CUDAGraph()
            options = {"pool": memory, "stream": aside, "capture_error_mode": "thread_local"}
            with self.module.graph(graph, **options):
                result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    @property
    def profiler(self) -> Any:
        """torch.profiler, or what Ascend's adapter has in its place."""
        return torch.profiler if self.kind != "npu" else importlib.import_module("torch_npu").profiler

    def supports(self, float_name: str) -> bool:
        if float_name != "bfloat16" or self.kind == "cpu":
            return True
        if self.kind == "cuda":  # emulation, which is slow, counts as support unless told otherwise
            return bool(self.module.is_bf16_supported(including_emulation=False))
        return bool(self.module.is_bf16_supported())

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of a CUDA GPU; None for other devices."""
        if self.kind != "cuda":
            return None
        major, minor = self.module.get_device_capability(self.index)
        return int(major), int(minor)

    def peak_flops(self, float_name: str) -> float:
        return 0.0 if self.kind == "cpu" else accelerator_flops(self.name, float_name)

    def synchronize(self) -> None:
        self.module.synchronize()

    def peak_memory(self) -> int:
        return int(self.module.max_memory_allocated())

    def total_memory(self) -> int | None:
        return None if self.kind == "cpu" else int(self.module.mem_get_info()[1])

    def release_memory(self) -> None:
        """Give cached memory back to an accelerator, and count its peak from here on."""
        if self.kind != "cpu":
            self.module.empty_cache()
            self.module.reset_peak_memory_stats()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        """Generator states as base64 text: the CPU's, and the device's where it has its own."""
        states = {"cpu": torch.get_rng_state()}
        if self.kind != "cpu":
            states[self.kind] = self.module.get_rng_state()
        return {kind: base64.b64encode(state.numpy().tobytes()).decode() for kind, state in states.items()}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore what is there for this kind of device; a run that moved to another kind starts new dropout masks."""
        for kind, text in state.items():
            content = bytearray(base64.b64decode(text, validate=True))
            tensor = torch.frombuffer(content, dtype=torch.uint8)
            if kind == "cpu":
                torch.set_rng_state(tensor)
            elif kind == self.kind:
                self.module.set_rng_state(tensor)


def open_device(config: Run, process: Process = ALONE, *, lengths_vary: bool = False) -> TorchDevice:
    """The device of a process, checked against the config. Raises ConfigError or DeviceError.

    lengths_vary: attention has a new shape in most calls. cuDNN builds a plan for each: 0.44 s on a
    B200 (modelscope/FunASR issue 3704). torch prefers it on an H100, and else takes FlashAttention.
    """
    unassigned = process.world_size > 1 and process.device_id is None
    device = select_device(
        config.device, index=device_index(config, process), threads=config.runtime.threads, perhaps_alone=unassigned
    )
    check_support(config, device)
    if lengths_vary and device.kind == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    if limit := config.context.most_bytes:
        device.module.set_per_process_memory_fraction(min(1.0, limit / device.module.mem_get_info()[1]))
    if config.train.deterministic:
        if device.kind == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return device


def select_device(kind: str, *, index: int = 0, threads: int | None = None, perhaps_alone: bool = False) -> TorchDevice:
    """The device asked for; ``auto`` takes an accelerator if there is one, and looks for an NPU
    where CANN is set up.
    perhaps_alone: where there is but one, it is that one, since some launchers hide the devices of
    the other ranks.

    Raises DeviceError when it is not there, saying why as far as torch tells.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if kind == "auto" and torch.cuda.is_available():
        kind = "cuda"
    elif kind == "auto":
        if any(map(os.environ.get, _CANN)):  # without CANN torch_npu cannot be loaded
            try:
                _import_npu()
            except DeviceError as error:
                LOG.warning(f"device=auto is the CPU here; {error}")
        kind = "npu" if _has_npu() else "cpu"
    if kind == "cpu":
        keep_freed_memory()
        return TorchDevice(kind="cpu", index=0, name=processor_name(), module=_CPU)
    if kind == "npu":
        _import_npu()
    elif not torch.cuda.is_available():
        build = (
            f"torch {torch.__version__} is built"
            f" {'for CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}"
        )
        raise DeviceError(f"device=cuda: no usable GPU ({build}); check nvidia-smi, or use device=cpu")
    module = getattr(torch, kind)
    count = module.device_count()
    if perhaps_alone and count == 1:
        index = 0
    if index >= count:
        raise DeviceError(
            f"device={kind}: number {index} asked for, but {count} found; start fewer ranks, or choose others"
        )
    module.set_device(index)
    return TorchDevice(kind=kind, index=index, name=module.get_device_name(index), module=module)


def check_support(config: Run, device: TorchDevice) -> None:
    """Refuse what torch devices cannot do in this version. Raises ConfigError or DeviceError."""
    with naming_auto(config, device.kind, "GPU or NPU"):
        check_device_id(config, device.kind)
        if device.kind == "cpu" and config.context.max_device_memory:
            raise ConfigError("context.max_device_memory is for accelerators; leave it out on a CPU")
        if device.kind == "cpu" and config.train.offload_activations:
            raise ConfigError(
                "train.offload_activations=true moves activations from an accelerator to the host; on a CPU they are"
                " there already; leave it out, or set train.recompute=full, which needs less memory"
            )
        least = {"tensorwise": (8, 9), "rowwise": (9, 0)}.get(config.precision.float8)
        if least is not None:
            require_package("torchao", extra="fp8", purpose="which multiplies in float8", load=False)
            _need_capability(f"precision.float8={config.precision.float8}", least, device)
        if config.precision.float8_head:
            _need_capability("precision.float8_head=true", (8, 9), device)
        if config.precision.compute == "float32":
            _warn_of_rounded_products(device)
        if config.parallel.async_tensor_parallel:
            _check_async_tensor_parallel(device)
        for part, float_name in config.precision.model_dump(exclude={"float8", "float8_head"}).items():
            if not device.supports(float_name):
                raise DeviceError(
                    f"precision.{part}={float_name}: {device.name} cannot; use float16 with dynamic"
                    " loss scale, or float32"
                )


def _warn_of_rounded_products(device: TorchDevice) -> None:
    """Warn where float32 matrices are rounded before they are multiplied.

    torch_npu makes them float16 before the Atlas A2 (allow_fp32_to_fp16; Ascend/pytorch,
    csrc/framework/LazyInitAclops.cpp). NVIDIA's images of torch ask for TF32 (docs.monai.io,
    precision_accelerating.md).
    """
    if device.kind == "npu" and not device.supports("bfloat16"):  # the first Ascend 910
        LOG.warning(
            "precision.compute=float32: on this Ascend torch_npu multiplies float32 matrices in"
            " float16; set precision=fp16 to have its loss scale too, or backend=mindspore"
        )
    # get_float32_matmul_precision() raises where a model has run on the CPU in this process
    if device.kind == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        LOG.warning(
            "precision.compute=float32: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 multiplies float32"
            " matrices in TF32, with 10 bits of fraction; unset it to have all 23"
        )


def _need_capability(key: str, least: tuple[int, int], device: TorchDevice) -> None:
    found = device.capability
    if found is None or found < least:
        has = "" if found is None else f" of compute capability {found[0]}.{found[1]}"
        raise DeviceError(
            f"{key}: this device is {device.name or device.kind}{has}, and float8 needs a CUDA GPU"
            f" of compute capability {least[0]}.{least[1]} or newer; set precision=bf16"
        )


def _check_async_tensor_parallel(device: TorchDevice) -> None:
    """Refuse devices whose compiler joins no messages with products. Raises DeviceError."""
    if device.kind != "cuda" or not device.compiles:
        lacks = "" if device.kind != "cuda" else " without Triton, a C compiler or Python.h"
        raise DeviceError(
            f"parallel.async_tensor_parallel=true: this device is {device.name or device.kind}"
            f"{lacks}, and the key needs CUDA GPUs and torch.compile; leave it out"
        )


def _has_npu() -> bool:
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def _import_npu() -> None:
    if _has_npu():
        return
    if importlib.util.find_spec("torch_npu") is None:
        raise DeviceError(
            "device=npu: torch_npu is not installed; install the release that matches this torch,"
            " and CANN, or set backend=mindspore"
        )
    try:
        importlib.import_module("torch_npu")  # registers torch.npu
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(f"device=npu: torch_npu cannot be loaded ({error}); source CANN's set_env.sh first") from None
    if not _has_npu():
        raise DeviceError("device=npu: torch_npu is installed but sees no NPU; check npu-smi info")


_CPU = SimpleNamespace(synchronize=lambda: None, max_memory_allocated=peak_resident_bytes)

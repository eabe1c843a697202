"""An H100 whose tensors have no memory, in a process with the variables of ``build.py``.

Tensors of the host are real. Those of the device are torch's fake ones: every operator checks that
they are on one device, and a number of theirs that the host wants to know is an error. What is
copied to the host on purpose is zero there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from common.accelerators import GIB

os.environ.pop("LD_PRELOAD", None)  # a compiler that is started needs no torch

NAME = "NVIDIA H100 80GB HBM3"
PROPERTIES = SimpleNamespace(
    name=NAME, type="cuda", index=0, major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472, total_memory=80 * GIB, L2_cache_size=50 * 2**20,
    gcnArchName="", is_integrated=0,
)  # fmt: skip
"""Properties that an H100 SXM reports."""
CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: False,  # seeds wait for it
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: PROPERTIES,
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": lambda device=None: (80 * GIB, 80 * GIB),
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, device="cuda": None,
    "Event": lambda **_: Mock(elapsed_time=lambda other: 1.0),
    "Stream": Mock,
    "current_stream": Mock(),
    "stream": lambda stream: nullcontext(),
    "graph_pool_handle": Mock(),
    "CUDAGraph": Mock,
    "graph": lambda graph, **_: FakeDevice.capturing(),
}


@contextmanager
def h100() -> Iterator[None]:
    """Let torch say that its device 0 is an H100, and take the attention that it takes there."""
    with ExitStack() as stack:
        for name, value in CUDA.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", attend))
        yield


def attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """The kernels of a GPU: flash for half types without a mask, else memory-efficient.

    torch's own choice is made in C++ that a build without CUDA lacks.
    """
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)
        return out
    if attn_mask is not None:
        assert attn_mask.dtype == q.dtype, "the kernels take a mask in the type of the queries"
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    wants_sum = any(each.requires_grad for each in (q, k, v))
    out, *_ = efficient(q, k, v, attn_mask, wants_sum, dropout_p, is_causal)
    return out


class FakeDevice(TorchDispatchMode):
    """Runs operators of the host, and only works out the shapes of those of the device."""

    captures = False
    """Whether a CUDA graph is made, which has no copies from or to the host."""

    @classmethod
    @contextmanager
    def capturing(cls) -> Iterator[None]:
        with patch.object(cls, "captures", True):
            yield

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if torch.is_inference_mode_enabled() and function.namespace == "aten":  # composed ones too
            with self:
                if (result := function.decompose(*arguments, **options)) is not NotImplemented:
                    return result
        name = function.overloadpacket.__name__
        target = None if options.get("device") is None else torch.device(options["device"]).type
        leaves = tree_leaves((arguments, options))
        on_device = any(isinstance(each, FakeTensor) for each in leaves)
        of_host = any(type(each) is Tensor for each in leaves) or target == "cpu"
        assert not (self.captures and of_host), f"{function} in a CUDA graph"
        if name == "_pin_memory":
            return arguments[0]
        if not on_device and target != "cuda":
            options.pop("pin_memory", None)
            with _disable_current_modes():
                return function(*arguments, **options)
        if name == "_to_copy" and target == "cpu":
            dtype = options.get("dtype") or arguments[0].dtype
            with _disable_current_modes():
                return torch.zeros(arguments[0].shape, dtype=dtype)
        if name == "copy_" and not isinstance(arguments[0], FakeTensor):
            with _disable_current_modes():
                return arguments[0].zero_()
        arguments, options = tree_map_only(Tensor, self._faked, (arguments, options))
        with self._fake:
            return function(*arguments, **options)

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)


@contextmanager
def fake_device() -> Iterator[None]:
    """Have the H100 in eager mode."""
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes it on the host, then moves it
    try:
        with h100(), patch.object(nn.Module, "_apply", _apply), FakeDevice():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Convert parameters. torch's own way swaps them, which fake ones do not allow."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    changed = function(parameter)
                each._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
    return module

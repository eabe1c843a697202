"""Compiles training steps for an H100 without a GPU, in a process with the device of build.py.

The engine runs over tensors without memory. torch's compiler generates what it would on the GPU.
Triton with ptxas makes a binary for sm_90a of every kernel.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from common.config.resolved import as_run
from common.parallel import kernels
from common.parallel.run import Run
from tests.fake_cuda.device import CUDA, fake_device, h100
from torch_gpt2.device import open_device
from torch_gpt2.engine import Engine


@dataclass(frozen=True)
class Kernel:
    name: str
    size: int
    """Bytes of the binary, of all that torch would choose among; 0 if Triton cannot compile it."""


@dataclass
class Graph:
    """A graph as torch's compiler made it."""

    nodes: list[tuple[Any, int]]
    """Scheduled nodes, each a kernel, and the bytes that it moves."""
    kernels: list[Kernel] = field(default_factory=list)
    """Kernels that Triton compiles."""
    calls: int = 0


class _Driver:
    """Answers to what Triton asks a GPU's driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


@contextmanager
def lowering(*, binaries: bool) -> Iterator[list[Graph]]:
    """Compile for the H100 and collect the graphs. Compiled calls return tensors of the device,
    without computing. binaries: compile the kernels too.
    """
    import torch._dynamo.device_interface
    import torch._functorch.config
    import torch._inductor.compile_fx
    import torch._inductor.config
    import triton
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers

    found: list[Graph] = []

    def lower(graph: Any) -> Any:
        source = graph.codegen()[0].value
        made = Graph(nodes=[(node, words * 4) for node, words in graph.count_bytes()[1]])
        found.append(made)
        if binaries:
            made.kernels += map(_binary, _KERNEL.findall(source))
            assert len(made.kernels) == source.count("async_compile.triton(")

        def call(inputs: list[Any]) -> Any:
            made.calls += 1
            fake = next(each.fake_mode for each in inputs if isinstance(each, torch.Tensor))
            with fake, torch.no_grad():
                return torch.fx.Interpreter(graph.orig_gm).run(*inputs)

        return SimpleNamespace(call=call, __file__="/dev/null", __path__="", key="")

    interface = torch._dynamo.device_interface.CudaInterface
    of_device: dict[str, Any] = {
        "exchange_device": lambda device: 0,
        "maybe_exchange_device": lambda device: 0,
        "get_raw_stream": lambda device: 0,
    }
    of_device |= {name: value for name, value in CUDA.items() if hasattr(interface, name)}
    of_device.pop("Event")
    with ExitStack() as stack:
        for context in (
            h100(),
            *(patch.object(interface, name, value) for name, value in of_device.items()),
            patch.object(torch.cuda, "_exchange_device", lambda device: 0),
            patch.object(torch.cuda, "_maybe_exchange_device", lambda device: 0),
            patch.object(torch.cuda, "is_initialized", lambda: True),
            patch.object(torch.cuda, "_is_compiled", lambda: True),
            patch.object(torch.version, "cuda", "12.8"),
            # both would make tensors on the device, to find patterns that GPT-2 has not
            patch.object(fuse_attention, "_sfdp_init", lambda *_: None),
            patch.object(pad_mm, "_pad_mm_init", lambda *_: None),
            # the address of an input, which has none
            patch.object(torch._inductor.compile_fx, "get_input_idxs_to_check", lambda *_: ()),
            patch.object(GraphLowering, "_compile_to_module", lower),
            patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
            torch._functorch.config.patch(
                enable_autograd_cache=False,
                graphsafe_rng_functionalization=False,  # reads a generator of the device
            ),
            torch._inductor.config.patch(
                fx_graph_cache=False,
                compile_threads=1,
                use_static_triton_launcher=False,
                joint_graph_constant_folding=False,  # fills tensors
                shape_padding=False,  # measures products
            ),
        ):
            stack.enter_context(context)
        triton.runtime.driver.set_active(_Driver())
        torch._dynamo.reset()
        yield found


_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''\n?(.*?)''', device_str='cuda'\)", re.S)


def _binary(kernel: tuple[str, str]) -> Kernel:
    from torch._inductor.codecache import PyCodeCache

    name, source = kernel
    tuner = getattr(PyCodeCache.load(source.replace("\\\\", "\\")), name)
    try:
        made = [tuner._precompile_config(choice) for choice in tuner.configs]
    except Exception as error:
        print(f"{name}: {error}", file=sys.stderr)
        return Kernel(name, 0)
    return Kernel(name, sum(len(each.kernel.asm["cubin"]) for each in made))


def lower_training(config: Run, layers: int = 1, *, validates: bool = True) -> None:
    """Compile a micro batch's forward and backward pass, of as many blocks, and a validation's batch."""
    shape = config.train.micro_batch_size, config.model.seq_length
    shallow = config.model.model_copy(update={"num_layers": layers})
    by_region = config.model.num_layers > kernels.MAX_LAYERS_IN_ONE_GRAPH
    most = 0 if by_region else layers
    train = config.train.model_copy(update={"compile": True, "offload_activations": False})
    config = config.model_copy(update={"device": "cuda", "model": shallow, "train": train})
    with fake_device(), patch.object(kernels, "MAX_LAYERS_IN_ONE_GRAPH", most):
        engine = Engine(as_run(Run, config), open_device(config))
        ids, targets = (torch.zeros(shape, dtype=torch.int64, device="cuda") for _ in range(2))
    engine.model.train()
    engine._loss_sum(ids, targets).backward()
    assert engine.master.take_gradients().keys() == engine.master.tensors.keys()
    if validates:
        engine.model.eval()
        with torch.no_grad():
            engine._loss_sum(ids, targets)


def fused_bytes(graphs: list[Graph]) -> tuple[int, int]:
    """Return the bytes that fused kernels move, and the number of products in float8."""
    moved = products = 0
    for graph in graphs:
        for node, size in graph.nodes:
            kernel = getattr(node, "node", None)
            if "Extern" in type(node).__name__:
                products += "scaled_mm" in str(getattr(kernel, "python_kernel_name", None))
                continue
            if type(node).__name__ == "NopKernelSchedulerNode":
                continue
            origins = {str(origin.target) for part in node.get_nodes() for origin in part.node.get_origins()}
            # a gather reads one number a row, though torch counts the whole table
            moved += 0 if any("gather" in name for name in origins) else size
    return moved, products

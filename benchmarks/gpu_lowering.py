"""Compile a training step and an evaluation to binaries for an H100, without a GPU.

    python benchmarks/gpu_lowering.py [CASE ...]

The engine runs as on an H100, over tensors without memory (tests/fake_cuda). torch's compiler
generates what it would there, and Triton with ptxas makes a binary for sm_90a of every kernel. One
block is compiled: the others have its kernels again. Without names all cases are compiled: every
preset that fits in 80 GB by the plan, and the options of a training. Needs Triton, which the extra
dev installs on x86-64.

Exit codes: 0 all kernels have a binary, 1 some have none, 2 there is no Triton or no compiler.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.accelerators import require_accelerator
from common.config.resolved import as_run
from common.errors import CheckpointError, ConfigError
from common.flags import make_parser
from common.parallel.run import Run
from common.planner.fitting import resolve_on
from common.planner.plan import make_plan, memory_limit, table
from common.program import command
from common.resolve import compilation
from common.resolve.derive import resolve_config
from common.run_config import load_config
from tests.fake_cuda.build import with_cuda
from tests.fake_cuda.device import CUDA, fake_device, h100
from torch_gpt2.device import open_device
from torch_gpt2.engine import Engine

DEVICE = require_accelerator("H100")
PRESETS = ROOT / "configs/gpt2"
ALONE = (
    "backend=torch",
    "engine=native",
    "parallel.parallel_mode=null",
    "parallel.data_parallel=1",
    "parallel.model_parallel=1",
    "parallel.pipeline_stage=1",
    "context.max_device_memory=null",
    "train.recompute_slice_activation=false",
)
"""Settings of a run on one GPU."""
SMALL = ("train.micro_batch_size=8", "train.global_batch_size=8", "train.recompute=none")
DOCUMENTS = ("data.eod_id=50256", "data.reset_attention_mask=true")
OPTIONS: dict[str, tuple[str, ...]] = {
    "float32": ("precision=float32",),
    "fp16": ("precision=fp16",),
    "bf16": (),
    "dropout": ("model.dropout=0.1",),
    "float8_head": ("precision.float8_head=true",),
    "fp8": ("precision=fp8",),
    "fp8 rowwise": ("precision.float8=rowwise",),
    "documents": DOCUMENTS,
    "documents, dropout": (*DOCUMENTS, "model.dropout=0.1"),
    "recompute selective": ("train.recompute=selective", "model.dropout=0.1"),
    "recompute full": ("train.recompute=full", "model.dropout=0.1"),
    "graphs by region": ("model.num_layers=36",),
    "attention written out": ("train.fused_attention=false",),
}
"""Settings of cases of the preset run_gpt2_124m."""


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
    """Compile a micro batch's forward and backward pass, of as many blocks, and a validation's
    batch.
    """
    shape = config.train.micro_batch_size, config.model.seq_length
    shallow = config.model.model_copy(update={"num_layers": layers})
    by_region = config.model.num_layers > compilation.MOST_LAYERS_IN_ONE_GRAPH
    most = 0 if by_region else layers
    train = config.train.model_copy(update={"compile": True, "offload_activations": False})
    config = config.model_copy(update={"device": "cuda", "model": shallow, "train": train})
    with fake_device(), patch.object(compilation, "MOST_LAYERS_IN_ONE_GRAPH", most):
        engine = Engine(as_run(Run, config), open_device(config))
        ids, targets = (torch.zeros(shape, dtype=torch.int64, device="cuda") for _ in range(2))
    engine.model.train()
    engine._loss_sum(ids, targets).backward()
    assert engine.master.take_gradients().keys() == engine.master.tensors.keys()
    if validates:
        engine.model.eval()
        with torch.no_grad():
            engine._loss_sum(ids, targets)


def cases() -> Iterator[tuple[str, Run]]:
    """Runs by name: presets that fit, with the micro batch that the plan chooses, then options."""
    for path in sorted(PRESETS.glob("run_gpt2*.yaml")):
        with suppress(ConfigError, CheckpointError):  # no single GPU, or weights that are not here
            config = resolve_on(load_config(path, ALONE), DEVICE, world_size=1)
            limit = memory_limit(config, DEVICE)
            if limit is not None and make_plan(config).peak < limit:
                yield path.stem, config
    for name, settings in OPTIONS.items():
        yield name, _resolved(PRESETS / "run_gpt2_124m.yaml", *SMALL, *settings)


def _resolved(path: Path, *settings: str) -> Run:
    config = load_config(path, [*ALONE, *settings])
    return resolve_config(config, world_size=1, samples_per_epoch=1_000_000)


@command()
def main(words: list[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names, or patterns of them")
    arguments = parser.parse_args(words)
    rows, failed = [], 0
    for name, config in cases():
        if arguments.cases and not any(fnmatch(name, each) for each in arguments.cases):
            continue
        begin = time.monotonic()
        with lowering(binaries=True) as graphs:
            lower_training(config)
        kernels = [kernel for graph in graphs for kernel in graph.kernels]
        without = sum(not kernel.size for kernel in kernels)
        failed += without
        rows.append(
            (
                name,
                str(config.train.micro_batch_size),
                str(len(graphs)),
                str(len(kernels)),
                f"{sum(kernel.size for kernel in kernels) / 1e3:.0f}",
                f"{sum(size for graph in graphs for _, size in graph.nodes) / 1e9:.2f}",
                str(without),
                f"{time.monotonic() - begin:.0f}",
            )
        )
        print(" | ".join(rows[-1]), flush=True)
    head = ("case", "micro batch", "graphs", "kernels", "kB of binaries")
    print("\n".join(table((*head, "GB moved", "failed", "seconds"), rows)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(with_cuda(main))

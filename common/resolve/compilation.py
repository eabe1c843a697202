"""Layouts in which torch.compile can compile the model, and runs that do."""

from __future__ import annotations

from common.accelerators import Hardware, find_accelerator
from common.parallel.run import Run

MAX_LAYERS_IN_ONE_GRAPH = 24
"""One graph takes some 2.6 seconds of a processor for each layer, measured at 4 and 12 layers.
Regions take as long for any number of layers.
"""


def is_compiled(config: Run, hardware: Hardware | None) -> bool:
    """Return whether a run on this device compiles its model. auto does on CUDA."""
    if config.backend != "torch" or config.train.compile != "auto":
        return config.backend == "torch" and config.train.compile is True
    known = find_accelerator(hardware.name) if hardware and hardware.name else None
    is_cuda = hardware is not None and (
        hardware.kind == "cuda" or (hardware.kind == "auto" and known is not None and "Ascend" not in known.name)
    )
    return is_cuda and compile_error(config) is None


def in_regions(config: Run) -> bool:
    """Return whether each region of a compiled model has a graph of its own."""
    return (
        config.topology.world_size > 1
        or config.model.num_layers > MAX_LAYERS_IN_ONE_GRAPH
        or config.train.offload_activations
    )


def compile_error(config: Run) -> str | None:
    """Return what contradicts train.compile=true in a config for torch, or None."""
    parallel = config.parallel
    if config.engine == "deepspeed" and (parallel.zero_stage == 3 or parallel.pipeline_stage > 1):
        return (
            f"with parallel.zero_stage={parallel.zero_stage} and"
            f" pipeline_stage={parallel.pipeline_stage}: DeepSpeed's hooks break the graph; leave"
            " compile out, or set engine=native"
        )
    if parallel.pipeline_stage > 1 and "zero_bubble" in parallel.pipeline_schedule:
        return (
            f"with parallel.pipeline_schedule={parallel.pipeline_schedule}: a compiled backward"
            " pass cannot be split into its two parts; leave compile out, or choose 1f1b or"
            " interleaved_1f1b"
        )
    if parallel.strategy == "parameter_server" and config.topology.world_size == 1:
        return (
            "with parallel.strategy=parameter_server in one process: torch.nn.DataParallel copies"
            " the model in each step; leave it out"
        )
    return None

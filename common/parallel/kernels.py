"""What a device decides of the computation: the kernel of attention, rows of the loss at once, and
whether torch.compile compiles the model.

MindSpore has a kernel that keeps no scores on Ascends (FlashAttentionScore). torch chooses such
kernels by itself, with and without a mask, where they are:

- torch_npu has none for the first Ascend 910 (op-plugin's ScaledDotProductAttentionKernelNpuOpApi);
- a CPU's has no dropout (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp).
"""

from __future__ import annotations

from common.accelerators import Hardware, find_accelerator
from common.parallel.run import Run

FIRST_ASCEND = "Ascend 910A"
"""Name of the Ascend that has neither this kernel nor bfloat16."""


def has_attention_kernel(kind: str, name: str | None) -> bool:
    """Return whether MindSpore has its kernel on a device. name: None if it is not known.

    kind: may be auto, which counts as an Ascend.
    """
    accelerator = find_accelerator(name) if name else None
    if accelerator is not None and kind != "cpu":
        return accelerator.name.startswith("Ascend") and accelerator.name != FIRST_ASCEND
    return kind in ("npu", "auto")


def suits_attention_kernel(config: Run) -> bool:
    """Return whether the kernel computes this model, and the run asks for it."""
    model, precision = config.model, config.precision
    return (
        config.train.fused_attention
        and precision.compute != "float32"
        and precision.softmax == "float32"
        and model.hidden_size // model.num_heads % 16 == 0
        and not model.attention_dropout
    )


def keeps_no_scores(config: Run, hardware: Hardware | None) -> bool:
    """Return whether attention is computed without all scores of a window.

    hardware: None for a device that has the kernels.
    """
    if config.backend == "mindspore":
        has_kernel = hardware is None or has_attention_kernel(hardware.kind, hardware.name)
        return has_kernel and suits_attention_kernel(config)
    if hardware is not None and hardware.kind == "cpu":
        has_kernel = not config.model.attention_dropout
    else:
        known = find_accelerator(hardware.name) if hardware and hardware.name else None
        has_kernel = known is None or known.name != FIRST_ASCEND
    return has_kernel and config.precision.softmax == "float32" and config.train.fused_attention


MIN_ROWS, MAX_ROWS = 1024, 16_384
_SHARE = 24
"""Float32 logits take at most this part of an accelerator's memory: 3.3 of 80 GB."""


def loss_rows(config: Run, memory: int | None) -> int:
    """Return how many positions have logits at one time: ``train.loss_rows`` if given.

    The head's gradient is added up once for each such part, so fewer parts move fewer bytes.
    memory: bytes of the accelerator, None on a CPU, where more rows are not faster.
    """
    if config.train.loss_rows is not None:
        return config.train.loss_rows
    if memory is None:
        return MIN_ROWS
    fitting = memory // (_SHARE * 4 * (config.vocab_rows // config.parallel.model_parallel))
    return min(MAX_ROWS, max(MIN_ROWS, 1 << fitting.bit_length() >> 1))


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
            f"with parallel.zero_stage={parallel.zero_stage} and pipeline_stage={parallel.pipeline_stage}: DeepSpeed's"
            " hooks break the graph; leave compile out, or set engine=native"
        )
    if parallel.pipeline_stage > 1 and "zero_bubble" in parallel.pipeline_schedule:
        return (
            f"with parallel.pipeline_schedule={parallel.pipeline_schedule}: a compiled backward pass cannot be split"
            " into its two parts; leave compile out, or choose 1f1b or interleaved_1f1b"
        )
    if parallel.strategy == "parameter_server" and config.topology.world_size == 1:
        return (
            "with parallel.strategy=parameter_server in one process: torch.nn.DataParallel copies"
            " the model in each step; leave it out"
        )
    return None

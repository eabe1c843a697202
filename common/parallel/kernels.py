"""What a device decides of the computation: the kernel of attention, and rows of the loss at once.

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
    if hardware is not None and not _has_kernel(config, hardware):
        return False
    if config.backend == "mindspore":
        return suits_attention_kernel(config)
    return config.precision.softmax == "float32" and config.train.fused_attention


def _has_kernel(config: Run, hardware: Hardware) -> bool:
    if config.backend == "mindspore":
        return has_attention_kernel(hardware.kind, hardware.name)
    if hardware.kind == "cpu":
        return not config.model.attention_dropout
    accelerator = find_accelerator(hardware.name) if hardware.name else None
    return accelerator is None or accelerator.name != FIRST_ASCEND


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

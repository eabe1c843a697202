"""Attention by one kernel that keeps no scores: where a framework has it on a device.

MindSpore has one on Ascends (FlashAttentionScore). torch chooses such kernels by itself, with and
without a mask, where they are:

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

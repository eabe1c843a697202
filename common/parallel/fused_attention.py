"""Attention by one kernel that keeps no scores: where a framework has it on a device.

MindSpore has one on Ascends (FlashAttentionScore). torch chooses such kernels by itself, with and
without a mask, where they are:

- torch_npu has none for the first Ascend 910 (op-plugin's ScaledDotProductAttentionKernelNpuOpApi);
- a CPU's has no dropout (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp).
"""

from __future__ import annotations

from common.accelerators import Accelerator, find_accelerator
from common.parallel.resolved_run import ResolvedRun

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


def suits_attention_kernel(config: ResolvedRun) -> bool:
    """Return whether the kernel computes this model, and the run asks for it."""
    model, precision = config.model, config.precision
    return (
        config.train.fused_attention
        and precision.compute != "float32"
        and precision.softmax == "float32"
        and model.hidden_size // model.num_heads % 16 == 0
        and not model.attention_dropout
    )


def with_attention(config: ResolvedRun, kind: str, name: str | None) -> ResolvedRun:
    """Return the run with ``train.fused_attention`` as a device computes attention."""
    accelerator = find_accelerator(name) if name else None
    if config.backend == "mindspore":
        found = has_attention_kernel(kind, name)
    elif kind == "cpu":
        found = not config.model.attention_dropout
    else:
        found = accelerator is None or accelerator.name != FIRST_ASCEND
    if found:
        return config
    train = config.train.model_copy(update={"fused_attention": False})
    return config.model_copy(update={"train": train})


def on_accelerator(config: ResolvedRun, device: Accelerator | None) -> ResolvedRun:
    """Return the run ``with_attention`` of an accelerator, or of the run's own device."""
    if device is None:
        return with_attention(config, config.device, None)
    return with_attention(config, "auto", device.name)


def keeps_no_scores(config: ResolvedRun) -> bool:
    """Return whether attention is computed without all scores of a window, on a device that
    ``with_attention`` has been asked about.
    """
    if config.backend == "mindspore":
        return suits_attention_kernel(config)
    return config.precision.softmax == "float32" and config.train.fused_attention

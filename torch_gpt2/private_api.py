"""The private interfaces of torch's kernels that this backend uses.

Those of pipelining are in ``torch_gpt2/parallel/private_api.py``, since importing that package
takes half a second. They were read in torch 2.13.0. The package accepts 2.11 to 2.13: a test names
one that is gone. ``PRIVATE`` says what each is for, and which public way would replace it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PRIVATE = {
    "torch.ops.mkldnn._reorder_linear_weight": "weights in oneDNN's own order, for products of few"
    " rows; publicly plain F.linear, half as fast for 8 rows, or torch.compile with frozen"
    " weights",
    "torch.ops.mkldnn._linear_pointwise": "the product with such weights, with a gelu or a sum in"
    " the same kernel; likewise",
    "torch.ops.mkldnn._is_mkldnn_acl_supported": "whether oneDNN multiplies through Arm's library,"
    " which has no gelu and no sum in the kernel; publicly nothing",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "whether the CPU multiplies bfloat16 at full"
    " speed; publicly the flags of torch.cpu.get_capabilities, where a version has it",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "likewise float16",
    "torch._int_mm": "products of 8-bit integers; publicly plain F.linear on them as float32, four"
    " times as slow",
    "torch._foreach_norm": "norms of all gradients in a few kernels; publicly"
    " torch.nn.utils.get_total_norm, which sums tensors of each type apart and so rounds"
    " differently",
    "torch._foreach_mul_": "all gradients times a factor in a few kernels; publicly a kernel a"
    " tensor",
}
"""Name -> what it is used for, and what is public instead."""


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of a type at full speed."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if dtype == torch.float32 or not available:
        return dtype == torch.float32
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """Copy a weight (out, in) into the order that oneDNN wants for products with so many rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def packed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gelu: bool = False,
    other: Tensor | None = None,
) -> Tensor:
    """Compute x W^T + b with a weight that ``pack_weight`` returned; of that the gelu (tanh form),
    or the sum with ``other``. All are of one type.
    """
    linear = torch.ops.mkldnn._linear_pointwise
    y: Tensor
    if other is not None:
        y = linear.binary(x, other, weight, bias, "add")
    elif gelu:
        y = linear.default(x, weight, bias, "gelu", [], "tanh")
    else:
        y = linear.default(x, weight, bias, "none", [], "")
    return y


def fuses_products() -> bool:
    """Whether ``packed_linear`` computes gelu and sum as fast as the product alone."""
    return not torch.ops.mkldnn._is_mkldnn_acl_supported()


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x W^T in int32, of int8 x (rows, in) and W (out, in)."""
    return torch._int_mm(x, weight.t())


@cache
def multiplies_integers() -> bool:
    """Whether ``integer_product`` is exact on this CPU. Kernels for processors without VNNI add
    pairs of products in 16 bits, which do not hold the largest ones.
    """
    largest = torch.full((4, 64), 127, dtype=torch.int8)
    return bool((integer_product(largest, largest) == 127 * 127 * 64).all())


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """Euclidean norm of each tensor."""
    norms: list[Tensor] = list(torch._foreach_norm(tensors))
    return norms


def foreach_multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply each tensor in place."""
    torch._foreach_mul_(tensors, factor)

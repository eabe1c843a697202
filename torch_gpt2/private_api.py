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
    "torch.ops.onednn.qlinear_prepack": "weights of 8 bits in oneDNN's own order, for products of"
    " several rows; publicly torch.compile of what torchao quantizes",
    "torch.ops.onednn.qlinear_pointwise": "the product with such weights; likewise",
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


class PackedIntegers:
    """An int8 weight (out, in) in oneDNN's own order, for products with several rows."""

    def __init__(self, weight: Tensor) -> None:
        out, width = weight.shape
        self._packed = torch.ops.onednn.qlinear_prepack(weight, [_FEW, width])
        self._ones, self._zeros = torch.ones(out), torch.zeros(out, dtype=torch.int32)

    def product(self, x: Tensor) -> Tensor:
        """Compute x W^T, added up in int32, of whole float32 numbers x (rows, in) from -128 to
        127; float32 (rows, out).
        """
        middle = 128  # the kernel takes numbers from 0, and what is 0 among them
        y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            (x + middle).to(torch.uint8), 1.0, middle, self._packed, self._ones, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y


_FEW = 16
"""Rows that integers are packed for; the order is the same for 1 to 64."""


@cache
def packs_integers() -> bool:
    """Whether products of ``PackedIntegers`` exist on this CPU and are exact."""
    if not multiplies_integers():
        return False
    numbers = torch.arange(3 * 4096).reshape(3, 4096) % 255 - 127
    large = torch.cat([numbers, torch.full_like(numbers[:1], 127)]).to(torch.int8)
    try:
        found = PackedIntegers(large).product(large.float())
    except RuntimeError:
        return False
    return torch.equal(found, integer_product(large, large).float())


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """Euclidean norm of each tensor."""
    norms: list[Tensor] = list(torch._foreach_norm(tensors))
    return norms


def foreach_multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply each tensor in place."""
    torch._foreach_mul_(tensors, factor)

"""Products and layer norms of few rows with weights that are converted once, for generation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_gpt2.model import LayerNorm
from torch_gpt2.private_api import fuses_products, has_kernel, pack_weight, packed_linear

_FEW = 16
"""Rows that weights are packed for. oneDNN's order for one row reads a third slower than its order
for 2 to 64 rows, which is as fast for one.
"""


class AnyProduct:
    """Product x -> x W^T + b, optionally followed by an operation in the same kernel."""

    def __init__(self, multiply: Callable[[Tensor], Tensor]) -> None:
        self._multiply = multiply

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        return self._multiply(x)

    def gelu(self, x: Tensor) -> Tensor:
        """Return the gelu (tanh form) of the product."""
        return F.gelu(self(x), approximate="tanh")

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Return ``other`` plus the product."""
        return other + self(x)


class Product(AnyProduct):
    """Product x W^T + b with weights that are converted once. Several weights are stacked.

    On a CPU, oneDNN uses its own order of weights: one row reads them at the speed of the memory,
    and a prompt is twice as fast. Without kernels for a type below float32, the rounded weights are
    held and multiplied in float32, and the result is rounded. Such a kernel does the same inside.
    """

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype, rows: int
    ) -> None:
        """Convert the weights. rows: usual number of rows of x."""
        on_cpu = weights[0].device.type == "cpu"
        self.dtype = torch.float32 if on_cpu and not has_kernel(dtype) else dtype
        self.weight = joined(weights, dtype).to(self.dtype)  # (out, in)
        self.bias = joined(biases, dtype).to(self.dtype) if biases else None
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.packed = on_cpu and has_onednn
        if self.packed:
            self.weight = pack_weight(self.weight, max(rows, _FEW))
        self.fused = self.packed and self.dtype == dtype and fuses_products()

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused:
            return packed_linear(x, self.weight, self.bias)
        product = packed_linear if self.packed else F.linear
        return product(x.to(self.dtype), self.weight, self.bias).to(x.dtype)

    def gelu(self, x: Tensor) -> Tensor:
        if self.fused:
            return packed_linear(x, self.weight, self.bias, gelu=True)
        return super().gelu(x)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        if self.fused:
            return packed_linear(x, self.weight, self.bias, other=other)
        return super().add(x, other)


class Norm:
    """A layer norm with its weights converted once."""

    def __init__(self, norm: LayerNorm) -> None:
        self.dtype = norm.norm_dtype
        self.shape = norm.weight.shape
        self.weight, self.bias = (part.detach().to(self.dtype) for part in (norm.weight, norm.bias))
        self.epsilon = norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """Compute in ``dtype`` and return the type of x."""
        wide = x.to(self.dtype)
        y = torch.layer_norm(wide, self.shape, self.weight, self.bias, self.epsilon)
        return y.to(x.dtype)


def joined(parts: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Stack parts along the first axis, in ``dtype`` if given. A single part of that type is not
    copied.
    """
    cast = [part.detach().to(dtype or part.dtype) for part in parts]
    return cast[0] if len(cast) == 1 else torch.cat(cast)

"""Products and layer norms of few rows with weights that are converted once, for generation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_gpt2.model import LayerNorm
from torch_gpt2.private_api import has_kernel, pack_weight, packed_linear

Multiply = Callable[[Tensor], Tensor]
"""Product x (..., in) -> x W^T + b (..., out)."""


class Product:
    """Product x W^T + b with weights that are converted once. Several weights are stacked.

    On a CPU they are in oneDNN's own order. Without kernels for a type below float32, the rounded
    weights are held and multiplied in float32, and the result is rounded. Such a kernel does the
    same inside.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype) -> None:
        on_cpu = weights[0].device.type == "cpu"
        self.dtype = torch.float32 if on_cpu and not has_kernel(dtype) else dtype
        self.weight = joined(weights, dtype).to(self.dtype)  # (out, in)
        self.bias = joined(biases, dtype).to(self.dtype) if biases else None
        self._linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        if on_cpu and has_kernel(self.dtype):
            self.weight = pack_weight(self.weight)
            self._linear = packed_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x.to(self.dtype), self.weight, self.bias).to(x.dtype)


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

"""Products of few rows with weights that are converted once, for generation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_gpt2.private_api import has_kernel, pack_weight, packed_linear


class Product:
    """x W^T + b for few rows of x, with the weights of several products one below the other,
    converted once.

    On a CPU without kernels for a type below float32, the rounded weights are held and multiplied
    in float32 and the result is rounded, which is what such a kernel does inside. In float32, for
    several rows, oneDNN wants the weights in an order of its own (twice as fast for 8 rows). For
    one row numpy's product reads them 1.3 to 1.6 times as fast as torch's.
    """

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype, rows: int
    ) -> None:
        on_cpu = weights[0].device.type == "cpu"
        self.dtype = torch.float32 if on_cpu and not has_kernel(dtype) else dtype
        weight = joined(weights, dtype).to(self.dtype)  # (out, in)
        self.bias = joined(biases, dtype).to(self.dtype) if biases else None
        is_float = on_cpu and self.dtype == torch.float32
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.packed = is_float and rows > 1 and has_onednn
        if self.packed:
            weight = pack_weight(weight, rows)
        self.matrix = None
        if is_float and rows == 1:  # a copy, since numpy asks for huge pages
            self.matrix = np.array(weight.numpy())
            weight = torch.from_numpy(self.matrix)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.matrix is not None and x.numel() == x.shape[-1]:
            row = torch.from_numpy(self.matrix @ x.to(self.dtype).reshape(-1).numpy())
            row = row if self.bias is None else row + self.bias
            return row.view(*x.shape[:-1], -1).to(x.dtype)
        product = packed_linear if self.packed else F.linear
        return product(x.to(self.dtype), self.weight, self.bias).to(x.dtype)


def joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """One below the other, in ``dtype``; a single part of that type is not copied."""
    cast = [part.detach().to(dtype) for part in parts]
    return cast[0] if len(cast) == 1 else torch.cat(cast)

"""Products of the tied head in float8, for the loss and its gradients.

Hidden states and table are e4m3 times a power of two, which follows from their largest value. The
slope lies in [-1, 1], so e5m2 takes it times a constant. Tensor cores want both operands with the
summed dimension last: everything exists in two orders, which a compiler writes by one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_gpt2.private_api import scaled_product

ROUNDED, SLOPE = torch.float8_e4m3fn, torch.float8_e5m2
MAX_E4M3 = 448.0
"""Largest number of e4m3."""
MIN_MAXIMUM = 1e-12
"""Tensors whose largest value is smaller are scaled as if it were this one."""
SLOPE_SCALE = 2.0**15
"""Factor of the slope in e5m2, whose largest number is 57344. Entries from 2^-29 on keep two bits
behind the leading one, and entries from 2^-31 on are not lost.
"""
_EXPONENT = 0x7F800000
"""Bits of the exponent of a float32."""


class Float8Head:
    """Hidden states (N, C) and table (V, C) in float8, and products of a slice of the rows.

    All sizes are multiples of 16, those of slices too. Products are bfloat16, summed in float32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden, self._unscale_hidden = _rounded(hidden)
        self._weight, self._unscale_weight = _rounded(weight)
        self._hidden_columns = self._hidden.t().contiguous()
        self._weight_columns = self._weight.t().contiguous()
        self._unscale_slope = torch.full((), 1.0 / SLOPE_SCALE, device=hidden.device)

    def logits(self, rows: slice) -> Tensor:
        """Return ``hidden[rows] @ weight.T``."""
        scales = self._unscale_hidden, self._unscale_weight
        return scaled_product(self._hidden[rows], self._weight.t(), *scales, fast=True)

    def add_gradients(self, slope: Tensor, rows: slice, weight_grad: Tensor) -> Tensor:
        """Return the gradient of ``hidden[rows]``, and add that of the table to a float32 sum.

        slope: float32 (n, V), which is overwritten. Its copy in the order of columns has its shape,
        so that loops over both fuse.
        """
        by_rows = slope.mul_(SLOPE_SCALE).to(SLOPE)
        strides = 1, slope.shape[0]
        by_columns = torch.empty_strided(slope.shape, strides, dtype=SLOPE, device=slope.device)
        by_columns.copy_(by_rows)
        scales = self._unscale_hidden, self._unscale_slope
        weight_grad += scaled_product(self._hidden_columns[:, rows], by_columns, *scales).t()
        scales = self._unscale_slope, self._unscale_weight
        return scaled_product(by_rows, self._weight_columns.t(), *scales)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in e4m3 and the factor that takes its scale out again.

    Scales are powers of two. They change no digit, so rounding does not depend on the other numbers
    of the tensor. A tensor that is not finite stays so.
    """
    most = x.abs().amax().float().clamp(min=MIN_MAXIMUM)
    scale = ((MAX_E4M3 / most).view(torch.int32) & _EXPONENT).view(torch.float32)
    return (x.float() * scale).to(ROUNDED), 1.0 / scale

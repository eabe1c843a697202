"""Cross-entropy of the tied head, without the float32 logits of a whole batch; its products in float8.

In float8 hidden states and table are e4m3 times a power of two, which follows from their largest
value. The slope lies in [-1, 1], so e5m2 takes it times a constant. Tensor cores want both operands
with the summed dimension last: everything exists in two orders, which a compiler writes by one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel.kernels import MIN_ROWS
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


ROWS_AT_ONCE = MIN_ROWS
"""Positions whose logits exist at one time: 1024 x 50304 float32 are 206 MB."""


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The head's rows are split over the ranks of a group: this one's begin at token ``first``."""

    group: dist.ProcessGroup
    first: int


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    shard: VocabularyShard | None = None,
    *,
    rows: int | None = None,
    masked: bool = False,
    float8: bool = False,
) -> Tensor:
    """Sum over N positions of the cross-entropy of ``hidden @ weight.T``, with columns from ``vocab_size`` on masked.

    hidden (N, C), weight (rows >= vocab_size, C), targets (N,). Returns a float32 scalar in nats. Gradients are found
    in the forward pass, chunk by chunk, so that no logits are kept. With a shard every rank of its group returns the
    whole sum, and the gradient of ``hidden`` is this rank's part of it. rows: positions whose logits exist at one time,
    ROWS_AT_ONCE if left out. masked: some targets are UNCOUNTED, which is below 0, and add nothing. float8: multiply in
    it where gradients are wanted; all sizes are then multiples of 16.
    """
    # Inside the function gradients are always off, and its needs_input_grad does not know of no_grad either.
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    rows = rows or ROWS_AT_ONCE
    inputs = (hidden, weight, targets, vocab_size, wanted, shard, rows, masked, float8 and wanted)
    return _CrossEntropySum.apply(*inputs)  # type: ignore[no-untyped-call, no-any-return]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        wanted: bool,
        shard: VocabularyShard | None,
        rows_at_once: int,
        masked: bool,
        float8: bool,
    ) -> Tensor:
        first = 0 if shard is None else shard.first
        head = Float8Head(hidden, weight) if float8 else _Head(hidden, weight)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wanted else None
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted else None
        for start in range(0, hidden.shape[0], rows_at_once):
            rows = slice(start, start + rows_at_once)
            logits = head.logits(rows).float()  # (n, rows of the table)
            logits[:, max(vocab_size - first, 0) :] = float("-inf")
            target = targets[rows, None] - first
            here = (target >= 0) & (target < weight.shape[0])
            target = target.masked_fill(~here, 0)
            picked = logits.gather(1, target).masked_fill(~here, 0.0)
            log_sum = logits.logsumexp(1, keepdim=True)
            if shard is not None:
                log_sum, picked = _over_shards(log_sum, picked, shard)
            counted = (targets[rows, None] >= 0).float() if masked else None
            loss = log_sum - picked
            # a new tensor, or torch 2.11's compiler loses its gradient
            total = total + (loss if counted is None else loss * counted).sum()
            if hidden_grad is not None and weight_grad is not None:
                # The softmax, minus one at the target. Not yet scaled by the loss scale or 1 / tokens, entries lie in
                # [-1, 1]: float16 does not lose them.
                if torch.compiler.is_compiling():  # one kernel of the comparison, and none of a scatter
                    columns = torch.arange(logits.shape[1], device=logits.device)
                    slope = (logits - log_sum).exp() - ((columns == target) & here).to(logits.dtype)
                else:  # faster operator by operator, in the memory of the logits
                    slope = logits.sub_(log_sum).exp_().scatter_add_(1, target, -here.to(logits.dtype))
                slope = slope if counted is None else slope * counted
                hidden_grad[rows] = head.add_gradients(slope, rows, weight_grad)
                del slope
            del logits  # or they would wait beside the next ones
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        # autograd rounds the second to the type in which it sums the gradient of the weight
        return ((hidden_grad * grads[0]).to(hidden_grad.dtype), weight_grad * grads[0], *[None] * 7)


class _Head:
    """Products of hidden states (N, C) with the table (V, C) in their type."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden = hidden
        self._weight = weight.to(hidden.dtype)

    def logits(self, rows: slice) -> Tensor:
        return self._hidden[rows] @ self._weight.t()

    def add_gradients(self, slope: Tensor, rows: slice, weight_grad: Tensor) -> Tensor:
        """Return the gradient of ``hidden[rows]``, and add that of the table to a float32 sum.

        slope: float32 (n, V).
        """
        hidden = self._hidden[rows]
        slope = slope.to(hidden.dtype)
        if hidden.dtype == torch.float32:
            weight_grad.addmm_(slope.t(), hidden)
        else:
            weight_grad += slope.t() @ hidden
        return slope @ self._weight


def _over_shards(log_sum: Tensor, picked: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of exponentials over all shards, and the target's logit, which one
    of them has; (n, 1) each.
    """
    largest = log_sum.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
    both = torch.cat([(log_sum - largest).exp(), picked], 1)
    dist.all_reduce(both, group=shard.group)
    return largest + both[:, :1].log(), both[:, 1:]

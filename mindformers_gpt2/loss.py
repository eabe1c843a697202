"""Cross-entropy of the tied head."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum over N positions of the cross-entropy of ``hidden @ weight.T``, with columns from ``vocab_size`` on masked.

    hidden (N, C), weight (rows >= vocab_size, C), targets (N,) int32. Returns a float32 scalar in nats.
    """
    logits = ops.MatMul(transpose_b=True)(hidden, ops.cast(weight, hidden.dtype))
    logits = ops.cast(logits[:, :vocab_size], ms.float32)
    shifted = logits - ops.stop_gradient(ops.ReduceMax(keep_dims=True)(logits, 1))
    log_sum = ops.log(ops.ReduceSum()(ops.exp(shifted), 1))
    picked = ops.GatherD()(shifted, 1, ops.expand_dims(targets, 1))
    return ops.ReduceSum()(log_sum - picked.reshape((-1,)))

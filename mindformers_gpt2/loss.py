"""Cross-entropy of the tied head, without the float32 logits of a whole batch."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

ROWS_AT_ONCE = 1024
"""Positions whose logits exist at one time: 1024 x 50304 float32 are 206 MB."""


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum over N positions of the cross-entropy of ``hidden @ weight.T``, with columns from ``vocab_size`` on left out.

    hidden (N, C), weight (rows >= vocab_size, C), targets (N,) int32. Returns a float32 scalar in nats.
    Gradients are found in the forward pass, chunk by chunk, so that no logits are kept; a graph that needs none drops them.
    """
    return _CrossEntropySum(vocab_size)(hidden, weight, targets)[0]


class _CrossEntropySum(nn.Cell):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.logits = ops.MatMul(transpose_b=True)
        self.hidden_slope = ops.MatMul()
        self.weight_slope = ops.MatMul(transpose_a=True)
        self.log_softmax = ops.LogSoftmax(-1)
        self.subtract_at = ops.TensorScatterSub()

    def construct(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sum, and its gradients by hidden (N, C) and weight (rows, C; float32)."""
        head = ops.cast(weight[: self.vocab_size], hidden.dtype)
        total, weight_grad = Tensor(0.0, ms.float32), None
        hidden_grads: tuple[Tensor, ...] = ()
        for start in range(0, hidden.shape[0], ROWS_AT_ONCE):
            rows = ops.depend(hidden[start : start + ROWS_AT_ONCE], total)  # one chunk after the other
            target = targets[start : start + ROWS_AT_ONCE]
            logits = ops.cast(self.logits(rows, head), ms.float32)  # (n, vocab_size)
            log_probabilities = self.log_softmax(logits)
            total = total - ops.ReduceSum()(ops.GatherD()(log_probabilities, 1, ops.expand_dims(target, 1)))
            # The softmax, and minus one at the target. Not yet scaled by the loss scale or 1 / tokens, entries lie in [-1, 1]:
            # float16 does not lose them.
            places = ops.stack((ops.arange(rows.shape[0], dtype=ms.int32), target), 1)
            slope = self.subtract_at(ops.exp(log_probabilities), places, ops.ones((rows.shape[0],), ms.float32))
            slope = ops.cast(slope, hidden.dtype)
            hidden_grads = (*hidden_grads, self.hidden_slope(slope, head))
            part = ops.cast(self.weight_slope(slope, rows), ms.float32)
            weight_grad = part if weight_grad is None else weight_grad + part
        padding = ops.zeros((weight.shape[0] - self.vocab_size, weight.shape[1]), ms.float32)
        return total, ops.concat(hidden_grads), ops.concat((weight_grad, padding)) if padding.shape[0] else weight_grad

    def bprop(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, out: tuple[Tensor, ...], slope: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        by_hidden = ops.cast(out[1] * slope[0], hidden.dtype)
        return by_hidden, ops.cast(out[2] * slope[0], weight.dtype), ops.zeros_like(targets)

"""Cross-entropy of the tied head, without the float32 logits of a whole batch."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, nn, ops

from common.parallel.kernels import MIN_ROWS
from mindformers_gpt2.parallel.collectives import AllGather, Group

ROWS_AT_ONCE = MIN_ROWS
"""Positions whose logits exist at one time: 1024 x 50304 float32 are 206 MB."""


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The head's rows are split over the ranks of a group: this one's begin at token ``first``."""

    group: Group
    first: int


class CrossEntropySum(nn.Cell):
    """Sum over N positions of the cross-entropy of ``hidden @ weight.T``, with columns from ``vocab_size`` on left out.

    Gradients are found in the forward pass, chunk by chunk, so that no logits are kept; a graph that needs none drops
    them. With a shard every rank of its group returns the whole sum, and the gradient of ``hidden`` is this rank's part
    of it.
    """

    def __init__(self, vocab_size: int, shard: VocabularyShard | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.rows_at_once = ROWS_AT_ONCE
        self.masked = False
        """Whether some targets are UNCOUNTED, which is below 0, and add nothing."""
        self.first = 0 if shard is None else shard.first
        self.gather = None if shard is None else AllGather(shard.group)
        self.logits = ops.MatMul(transpose_b=True)
        # transposed: a CPU takes longer for the plain product over so many columns
        self.hidden_slope = ops.MatMul(transpose_a=True, transpose_b=True)
        self.weight_slope = ops.MatMul(transpose_a=True)
        self.log_softmax, self.softmax = ops.LogSoftmax(-1), ops.Softmax(-1)
        self.subtract_at = ops.TensorScatterSub()
        # not minus infinity: a rank may have nothing but padding, and differences with its largest
        # logit must be numbers
        self.zero, self.far_below = Tensor(0.0, ms.float32), Tensor(-1e30, ms.float32)

    def construct(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (N, C), weight (rows, C), targets (N,) int32. Returns the sum, a float32 scalar in
        nats, and its gradients by hidden (N, C) and weight (rows, C; float32).
        """
        head = ops.cast(weight if self.gather is not None else weight[: self.vocab_size], hidden.dtype)
        total, weight_grad = Tensor(0.0, ms.float32), None
        hidden_grads: tuple[Tensor, ...] = ()
        for start in range(0, hidden.shape[0], self.rows_at_once):
            # one chunk after the other
            rows = ops.depend(hidden[start : start + self.rows_at_once], total)
            target = targets[start : start + self.rows_at_once]
            logits = ops.cast(self.logits(rows, head), ms.float32)  # (n, vocab_size)
            here = ops.ones((rows.shape[0],), ms.float32)
            counted = here
            if self.masked:
                counted = ops.cast(target >= 0, ms.float32)
            if self.gather is None:
                probabilities = self.softmax(logits)
                if self.masked:
                    target = target * ops.cast(counted, ms.int32)
                picked = ops.GatherD()(self.log_softmax(logits), 1, ops.expand_dims(target, 1))
                if self.masked:
                    picked = picked * counted.reshape((-1, 1))
                total = total - ops.ReduceSum()(picked)
            else:
                target = target - self.first
                inside = ops.logical_and(target >= 0, target < logits.shape[1])
                here = ops.cast(inside, ms.float32)
                target = target * ops.cast(inside, ms.int32)
                padding = ops.arange(logits.shape[1], dtype=ms.int32) >= self.vocab_size - self.first
                logits = ops.select(padding.reshape((1, -1)), self.far_below, logits)
                largest, exponentials, picked = self._over_shards(logits, target, here)
                probabilities = ops.exp(logits - largest.reshape((-1, 1))) / exponentials.reshape((-1, 1))
                loss = ops.log(exponentials) - (picked - largest)
                if self.masked:
                    loss = loss * counted
                total = total + ops.ReduceSum()(loss)
            # The softmax, and minus one at the target. It is not the exp of log-probabilities:
            # their rounding is the same along a row, so it would not cancel. Without the loss
            # scale and 1 / tokens, entries lie in [-1, 1]: float16 does not lose them.
            places = ops.stack((ops.arange(rows.shape[0], dtype=ms.int32), target), 1)
            slope = self.subtract_at(probabilities, places, here)
            if self.masked:
                slope = slope * counted.reshape((-1, 1))
            slope = ops.cast(slope, hidden.dtype)
            hidden_grads = (*hidden_grads, ops.transpose(self.hidden_slope(head, slope), (1, 0)))
            part = ops.cast(self.weight_slope(slope, rows), ms.float32)
            weight_grad = part if weight_grad is None else weight_grad + part
        if self.gather is None:
            padding = ops.zeros((weight.shape[0] - self.vocab_size, weight.shape[1]), ms.float32)
            weight_grad = ops.concat((weight_grad, padding)) if padding.shape[0] else weight_grad
        return total, ops.concat(hidden_grads), weight_grad

    def bprop(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, out: tuple[Tensor, ...], slope: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        by_hidden = ops.cast(out[1] * slope[0], hidden.dtype)
        return by_hidden, ops.cast(out[2] * slope[0], weight.dtype), ops.zeros_like(targets)

    def _over_shards(self, logits: Tensor, target: Tensor, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combine all shards: the largest logit, the sum of exponentials of differences with it,
        and the target's logit, which one of them has. Each is (n,).
        """
        largest = ops.ReduceMax()(logits, 1)
        total = ops.ReduceSum()(ops.exp(logits - largest.reshape((-1, 1))), 1)
        picked = ops.select(here > 0.0, ops.GatherD()(logits, 1, ops.expand_dims(target, 1)).reshape((-1,)), self.zero)
        assert self.gather is not None
        # (ranks, 3, n)
        parts = self.gather(ops.concat((largest, total, picked)).reshape((1, 3, -1)))
        whole = ops.ReduceMax()(parts[:, 0], 0)
        return (whole, ops.ReduceSum()(parts[:, 1] * ops.exp(parts[:, 0] - whole), 0), ops.ReduceSum()(parts[:, 2], 0))

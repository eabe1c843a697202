"""Cross-entropy of the tied head, without the float32 logits of a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 1024
"""Positions whose logits exist at one time: 1024 x 50304 float32 are 206 MB."""


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Sum over N positions of the cross-entropy of ``hidden @ weight.T``, with columns from ``vocab_size`` on masked.

    hidden (N, C), weight (rows >= vocab_size, C), targets (N,). Returns a float32 scalar in nats.
    Gradients are found in the forward pass, chunk by chunk, so that no logits are kept.
    """
    # Inside the function gradients are always off, and its needs_input_grad does not know of no_grad either.
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _CrossEntropySum.apply(hidden, weight, targets, vocab_size, wanted)  # type: ignore[no-untyped-call, no-any-return]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, wanted: bool) -> Tensor:
        head = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wanted else None
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted else None
        for start in range(0, hidden.shape[0], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            logits = (hidden[rows] @ head.t()).float()  # (n, rows of the table)
            logits[:, vocab_size:] = float("-inf")
            target = targets[rows, None]
            picked = logits.gather(1, target)
            log_sum = logits.logsumexp(1, keepdim=True)
            total += (log_sum - picked).sum()
            if hidden_grad is None or weight_grad is None:
                continue
            slope = logits.sub_(log_sum).exp_()  # softmax, and minus one at the target
            slope.scatter_add_(1, target, slope.new_full((1, 1), -1.0).expand_as(target))
            # Not yet scaled by the loss scale or 1 / tokens, entries lie in [-1, 1]: float16 does not lose them.
            slope = slope.to(hidden.dtype)
            hidden_grad[rows] = slope @ head
            if hidden.dtype == torch.float32:
                weight_grad.addmm_(slope.t(), hidden[rows])
            else:
                weight_grad += slope.t() @ hidden[rows]
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return (hidden_grad * grads[0]).to(hidden_grad.dtype), (weight_grad * grads[0]).to(ctx.weight_dtype), None, None, None

"""The one fused optimizer that Ascend has, by the formula of its documentation (aclnnApplyAdamWV2).

A kernel updates one tensor, and numbers of the host are rounded to float32. The arguments
that should skip or scale a step are ignored, as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

calls: list[int] = []
"""Number of tensors of each call, for tests."""


@library.impl("aten::_fused_adamw_", "PrivateUse1")
def _fused_adamw(
    *given: list[Tensor], lr: float, beta1: float, beta2: float, weight_decay: float, eps: float, **options: Any
) -> None:
    weights, gradients, first, second, largest, updates = given
    lists = (weights, gradients, first, second, updates)
    assert len({len(each) for each in lists}) == 1 and not largest, "lists of equal length"
    assert not options["amsgrad"] and not options["maximize"], "not simulated"
    calls.append(len(weights))
    for weight, gradient, m, v, step in zip(*lists, strict=True):
        assert {each.dtype for each in (weight, gradient, m, v)} == {torch.float32}
        assert weight.shape == gradient.shape == m.shape == v.shape and step.numel() == 1
        assert {each.device for each in (weight, gradient, m, v, step)} == {weight.device}
        rate, one, two, decay, small = (
            torch.full((), number, device=weight.device) for number in (lr, beta1, beta2, weight_decay, eps)
        )
        weight.mul_(1 - rate * decay)
        m.mul_(one).add_((1 - one) * gradient)
        v.mul_(two).add_((1 - two) * gradient * gradient)
        roots = v.sqrt() / (1 - two**step).sqrt() + small
        weight.sub_(rate / (1 - one**step) * (m / roots))

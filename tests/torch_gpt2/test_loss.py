"""The chunked loss against torch's cross_entropy on whole float32 logits."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gpt2.loss import cross_entropy_sum


class CountProducts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return function(*args, **(kwargs or {}))


def make(
    rows: int = 37, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(128, 16, requires_grad=True)
    return hidden, weight, torch.randint(0, 101, (rows,))


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        hidden.float() @ weight[:101].t(), targets, ignore_index=-1, reduction="sum"
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 10, 37, 1000])
def test_loss_and_gradients_equal_plain_cross_entropy(rows_at_once: int, masked: bool) -> None:
    """masked: targets of -1 add nothing."""
    hidden, weight, targets = make()
    if masked:
        targets[::3] = -1
    loss = cross_entropy_sum(hidden, weight, targets, 101, rows=rows_at_once, masked=masked)
    expected = plain(hidden, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    found, wanted = (
        torch.autograd.grad(value * 3.0, (hidden, weight)) for value in (loss, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets = make()
    loss = cross_entropy_sum(hidden * 1e4, weight, targets, 101)
    loss.backward()
    torch.testing.assert_close(loss, plain(hidden * 1e4, weight, targets), rtol=1e-6, atol=0)
    assert weight.grad.isfinite().all()


def test_float16_keeps_small_gradients() -> None:
    """Divided by the number of tokens before the cast, most entries of the slope would round to 0
    in float16.
    """
    hidden, weight, targets = make(rows=512, dtype=torch.float16)
    (cross_entropy_sum(hidden, weight, targets, 101) / 65536 * 1024).backward()
    exact_hidden, exact_weight, _ = make(rows=512, dtype=torch.float16)
    exact_hidden = exact_hidden.detach().float().requires_grad_()
    (plain(exact_hidden, exact_weight, targets) / 65536 * 1024).backward()
    torch.testing.assert_close(weight.grad, exact_weight.grad, rtol=0.01, atol=1e-4)
    torch.testing.assert_close(hidden.grad.float(), exact_hidden.grad, rtol=0.01, atol=1e-4)


def test_no_gradient_is_computed_when_none_is_wanted() -> None:
    hidden, weight, targets = make()
    with torch.no_grad(), CountProducts() as products:
        loss = cross_entropy_sum(hidden, weight, targets, 101)
    assert not loss.requires_grad and products.count == 1
    with CountProducts() as products:
        cross_entropy_sum(hidden, weight, targets, 101)
    assert products.count == 3
    torch.testing.assert_close(loss, plain(hidden, weight, targets).detach(), rtol=1e-6, atol=1e-5)

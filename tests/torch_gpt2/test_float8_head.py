"""precision.float8_head: the loss on a CPU against float64 formulas. Runs: test_float8.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.parallel.packing import UNCOUNTED
from torch_gpt2.loss import cross_entropy_sum

WINDOW, WIDTH, ROWS, VOCAB = 208, 48, 144, 131


def make(
    positions: int = WINDOW, width: int = WIDTH, rows: int = ROWS, spread: float = 0.3
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(positions, width).bfloat16().requires_grad_()
    return hidden, (spread * torch.randn(rows, width)).requires_grad_()


def in_e4m3(x: Tensor) -> Tensor:
    """Return the numbers as e4m3 holds them, times the power of two that brings the largest one
    below 448.
    """
    x = x.detach().double()
    scale = 2.0 ** (448 / x.abs().max()).log2().floor()
    return (x * scale).float().to(torch.float8_e4m3fn).double() / scale


def slope_of(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return loss and slope in float64 of e4m3 numbers, with logits in bfloat16."""
    logits = (in_e4m3(hidden) @ in_e4m3(weight)[:vocab].T).bfloat16().double()
    counted, each = targets >= 0, logits.log_softmax(1)
    wanted = torch.nn.functional.one_hot(targets.clamp(min=0), vocab).double()
    loss = -(each * wanted).sum(1)[counted].sum()
    return loss, (each.exp() - wanted) * counted[:, None]


@pytest.mark.parametrize("chunk", [64, 80, 1024])
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_the_formula(chunk: int, masked: bool) -> None:
    """Chunks divide the rows or not; padded columns of the table have no gradient."""
    hidden, weight = make()
    targets = torch.randint(0, VOCAB, (WINDOW,))
    if masked:
        targets[::3] = UNCOUNTED
    loss = cross_entropy_sum(hidden, weight, targets, VOCAB, rows=chunk, masked=masked, float8=True)
    (3.0 * loss).backward()
    expected, slope = slope_of(hidden, weight, targets, VOCAB)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    in_e5m2 = (slope.float() * 2.0**15).to(torch.float8_e5m2).double() / 2.0**15
    for found, wanted, exact in (
        (hidden.grad, in_e5m2 @ in_e4m3(weight)[:VOCAB], slope @ weight[:VOCAB].double()),
        (weight.grad[:VOCAB], in_e5m2.T @ in_e4m3(hidden), slope.T @ hidden.double()),
    ):
        # products are rounded to bfloat16, and so is the sum of the first one
        assert (found.double() / 3 - wanted).abs().max() < 2**-7 * wanted.abs().max()
        assert (wanted - exact).abs().max() > 2 * (found.double() / 3 - wanted).abs().max()
    assert not weight.grad[VOCAB:].any()
    if masked:
        assert not hidden.grad[::3].any()


def test_gradients_of_rare_tokens_keep_two_bits() -> None:
    """Each entry of the head's gradient is a sum over positions of slope x hidden. e5m2 rounds a
    slope by 1/8 at most, e4m3 a hidden number by 1/16. The smallest numbers lose an absolute part.
    """
    vocab, rows = 50257, 50304
    hidden, weight = make(64, 16, rows, 0.02)
    targets = torch.randint(0, 2000, (64,))
    cross_entropy_sum(hidden, weight, targets, vocab, rows=28, float8=True).backward()
    _, slope = slope_of(hidden, weight, targets, vocab)
    numbers = hidden.detach().double()
    exact, found = slope.T @ numbers, weight.grad[:vocab].double()
    rounding = (1 + 1 / 8) * (1 + 1 / 16) - 1
    products = 3 * 2**-8  # three chunks, rounded to bfloat16
    scale = 2.0 ** (448 / numbers.abs().max()).log2().floor()
    smallest = 64 * 2.0**-32 * numbers.abs().max() + slope.abs().sum(0) * 2**-10 / scale
    bound = (rounding + products) * (slope.T.abs() @ numbers.abs()) + smallest[:, None]
    assert ((found - exact).abs() <= bound).all()
    rare = torch.ones(vocab, dtype=torch.bool).index_fill(0, targets, False)
    for chosen, least, most in ((slice(None), 0.005, 0.04), (rare, 0.02, 0.08)):
        error = (found[chosen] - exact[chosen]).norm() / exact[chosen].norm()
        assert least < error < most  # 0.027 and 0.059 were found
    assert found[rare].any(1).all()


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 1])
def test_a_number_that_is_not_finite_makes_the_loss_so(number: float, where: int) -> None:
    inputs = make()
    with torch.no_grad():
        inputs[where][7, 3] = number
    loss = cross_entropy_sum(*inputs, torch.zeros(WINDOW, dtype=torch.int64), VOCAB, float8=True)
    assert not loss.isfinite()


def test_a_loss_without_gradients_is_that_of_bf16() -> None:
    hidden, weight = make()
    targets = torch.randint(0, VOCAB, (WINDOW,))
    with torch.no_grad():
        losses = [
            cross_entropy_sum(hidden, weight, targets, VOCAB, float8=each) for each in (True, False)
        ]
    assert torch.equal(*losses)
    assert not torch.equal(
        losses[0], cross_entropy_sum(hidden, weight, targets, VOCAB, float8=True)
    )


@pytest.mark.long
def test_compiled_it_is_one_graph_with_the_same_numbers() -> None:
    targets, found = torch.randint(0, VOCAB, (WINDOW,)), []
    targets[:50] = UNCOUNTED
    for wrap in (lambda function: function, torch.compile(fullgraph=True, dynamic=False)):
        hidden, weight = make()

        def loss_sum(hidden: Tensor, weight: Tensor) -> Tensor:
            return cross_entropy_sum(
                hidden, weight, targets, VOCAB, rows=80, masked=True, float8=True
            )

        loss = wrap(loss_sum)(hidden, weight)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for eager, compiled in zip(*found, strict=True):
        # an exponential that is one digit off may be rounded to the next number of e5m2
        assert (eager - compiled).abs().max() < 2**-7 * eager.abs().max()

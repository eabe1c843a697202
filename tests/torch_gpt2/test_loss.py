"""The chunked loss against torch's cross_entropy on whole float32 logits, and that of
precision.float8_head on a CPU against float64 formulas. Runs of it: test_float8.py.

Gradients of our autograd Functions under torch.compile, in every version of torch.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.parallel.run import UNCOUNTED
from common.quantization import activation_levels
from torch_gpt2.loss import VocabularyShard, cross_entropy_sum
from torch_gpt2.parallel import tensor_parallel
from torch_gpt2.quantize import FakeQuantize


def make(rows: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(128, 16, requires_grad=True)
    return hidden, weight, torch.randint(0, 101, (rows,))


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden.float() @ weight[:101].t(), targets, ignore_index=-1, reduction="sum")


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
    found, wanted = (torch.autograd.grad(value * 3.0, (hidden, weight)) for value in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets = make()
    loss = cross_entropy_sum(hidden * 1e4, weight, targets, 101)
    loss.backward()
    torch.testing.assert_close(loss, plain(hidden * 1e4, weight, targets), rtol=1e-6, atol=0)
    assert weight.grad.isfinite().all()


def test_float16_keeps_small_gradients() -> None:
    """Divided by the number of tokens before the cast, most entries of the slope would round to 0 in float16."""
    hidden, weight, targets = make(rows=512, dtype=torch.float16)
    (cross_entropy_sum(hidden, weight, targets, 101) / 65536 * 1024).backward()
    exact_hidden, exact_weight, _ = make(rows=512, dtype=torch.float16)
    exact_hidden = exact_hidden.detach().float().requires_grad_()
    (plain(exact_hidden, exact_weight, targets) / 65536 * 1024).backward()
    torch.testing.assert_close(weight.grad, exact_weight.grad, rtol=0.01, atol=1e-4)
    torch.testing.assert_close(hidden.grad.float(), exact_hidden.grad, rtol=0.01, atol=1e-4)


WINDOW, VOCAB = 208, 131


def make_float8(
    positions: int = WINDOW, width: int = 48, rows: int = 144, spread: float = 0.3
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(positions, width).bfloat16().requires_grad_()
    return hidden, (spread * torch.randn(rows, width)).requires_grad_()


def in_e4m3(x: Tensor) -> Tensor:
    """Return the numbers as e4m3 holds them, times the power of two that brings the largest one below 448."""
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
    hidden, weight = make_float8()
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
    hidden, weight = make_float8(64, 16, rows, 0.02)
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


@pytest.mark.parametrize("where", [0, 1])
def test_a_number_that_is_not_finite_makes_the_loss_so(where: int) -> None:
    for number in (float("inf"), float("-inf"), float("nan")):
        inputs = make_float8()
        with torch.no_grad():
            inputs[where][7, 3] = number
        loss = cross_entropy_sum(*inputs, torch.zeros(WINDOW, dtype=torch.int64), VOCAB, float8=True)
        assert not loss.isfinite()


def test_a_loss_without_gradients_is_that_of_bf16() -> None:
    hidden, weight = make_float8()
    targets = torch.randint(0, VOCAB, (WINDOW,))
    with torch.no_grad():
        losses = [cross_entropy_sum(hidden, weight, targets, VOCAB, float8=each) for each in (True, False)]
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], cross_entropy_sum(hidden, weight, targets, VOCAB, float8=True))


def test_compiled_it_is_one_graph_with_the_same_numbers() -> None:
    targets, found = torch.randint(0, VOCAB, (WINDOW,)), []
    targets[:50] = UNCOUNTED
    loss_sum = partial(cross_entropy_sum, rows=80, masked=True, float8=True)
    compiled = torch.compile(loss_sum, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    for function in (loss_sum, compiled):
        hidden, weight = make_float8()
        loss = function(hidden, weight, targets, VOCAB)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for eager, compiled in zip(*found, strict=True):
        # an exponential that is one digit off may be rounded to the next number of e5m2
        assert (eager - compiled).abs().max() < 2**-7 * eager.abs().max()


TARGETS = torch.arange(32)
FUNCTIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "loss": lambda x, _: cross_entropy_sum(x, x + 1.0, TARGETS, 30, rows=8),
    "loss of a shard": lambda x, group: cross_entropy_sum(
        x, x + 1.0, TARGETS, 30, VocabularyShard(group=group, first=0), rows=32
    ),
    "quantizer": lambda x, _: FakeQuantize.apply(x, torch.ones(()), activation_levels(8)),
} | {
    name: lambda x, group, name=name: getattr(tensor_parallel, name).apply(x[None], group)
    for name in ("_Copy", "_Sum", "_Gather", "_Scatter")
}


@pytest.fixture
def group() -> Iterator[Any]:
    """Two ranks whose messages are lost."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_else_holds_what_a_function_returns(name: str, group: Any) -> None:
    """torch 2.11's compiler returns all tensors of the forward pass, and of one that is there twice, since an operator
    changed it in place, the gradient is lost: it was 0 (2.13 leaves it out).
    """
    counts = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        for part, body in module.named_children():
            if part.startswith("fwd_body"):
                held = fx.Interpreter(body, garbage_collect_values=False)
                *nodes, last = body.graph.nodes
                values = [node.meta["example_value"] for node in nodes if node.op == "placeholder"]
                with values[0].fake_mode:
                    held.run(*values)
                result = held.env[torch.utils._pytree.tree_leaves(last.args)[0]]
                counts.append(sum(held.env[node] is result for node in nodes))
        return module

    x = torch.ones(32, 16, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(FUNCTIONS[name], backend=backend, dynamic=False)(x * 1.0, group)
    assert counts == [1]

"""Gradients of our autograd Functions under torch.compile, in every version of torch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.quantization.scheme import activation_levels
from torch_gpt2.loss import VocabularyShard, cross_entropy_sum
from torch_gpt2.parallel import tensor_parallel
from torch_gpt2.quantize import FakeQuantize

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
    """torch 2.11's compiler returns all tensors of the forward pass, and of one that is there
    twice, since an operator changed it in place, the gradient is lost: it was 0 (2.13 leaves it
    out).
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

"""Dropout masks of the ranks of a layout, by statistics: equal where they must be, independent
elsewhere, the same in a second run.

One process plays each rank in turn. The weights are such that what the layers give is 1 before
dropout, so that a mask can be read off.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.parallel.run import Run
from tests.tiny import tiny_config
from torch_gpt2.device import select_device
from torch_gpt2.parallel.layout import build_parts, seed_offset
from torch_gpt2.parallel.world import World, _make_groups

RATE, RANKS, BATCH, LENGTH, WIDTH, HEAD_SIZE = 0.25, 4, 4, 32, 64, 8
SIZES = {"hidden_size": WIDTH, "num_heads": WIDTH // HEAD_SIZE, "seq_length": LENGTH}


def masks_of(config: Run, rank: int) -> dict[str, Tensor]:
    """For two forward passes of this rank's layers: whether an element was kept, (elements,); of attention, how far the
    weights kept by each query of each head are from their mean, in standard deviations of a single key.
    """
    device, topology = select_device("cpu"), config.topology
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    world = World(rank=rank, size=RANKS, topology=topology, groups=_make_groups(topology, rank))
    model = build_parts(config, device, world)[0].train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float(name.endswith(("wpe.weight", "c_proj.bias", "v_proj.bias"))))
    seen: dict[str, Tensor] = {}
    visible = torch.arange(1, LENGTH + 1, dtype=torch.float64)

    def keep(name: str, x: Tensor) -> None:
        seen[f"pass {number} {name}"] = x.detach().flatten()

    first = "0" if world.at.pipeline == 0 else None
    for index, block in model.h.named_children():
        inputs: list[Tensor] = []
        block.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
        block.ln_2.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))

        def read(at: str, inputs: list[Tensor], _: Any, __: Any, output: Tensor) -> None:
            before, between = inputs
            if at == first:
                keep("embedding", before > 0)
            keep(f"attention output {at}", between - before > 0.5)
            keep(f"mlp output {at}", output - between > 0.5)
            inputs.clear()

        def read_heads(at: str, _: Any, args: tuple[Tensor]) -> None:
            kept = args[0].double()[..., ::HEAD_SIZE].transpose(1, 2)  # (B, heads of this rank, T)
            keep(f"heads {at}", (kept - 1.0) * (visible * (1 - RATE) / RATE).sqrt())

        block.register_forward_hook(partial(read, index, inputs))
        block.attn.c_proj.register_forward_pre_hook(partial(read_heads, index))
    device.seed(config.seed + seed_offset(config, world))
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for number in range(2):  # noqa: B007  (keep reads it)
        model(ids if first else torch.zeros(BATCH, LENGTH, WIDTH))
    dist.destroy_process_group()
    return seen


def assert_mean(found: Tensor, share: float) -> None:
    """Within five standard deviations: of a share of kept elements, or of the mean of what attention keeps, 0."""
    expected, variance = (share, share * (1 - share)) if found.dtype == torch.bool else (0.0, 1.0)
    assert abs(found.double().mean().item() - expected) < 5 * math.sqrt(variance / found.numel())


def assert_independent(one: Tensor, other: Tensor) -> None:
    assert_mean(one == other if one.dtype == torch.bool else one * other, RATE**2 + (1 - RATE) ** 2)


@pytest.fixture(autouse=True)
def no_group_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(  # torch 2.11's fake group would write nothing
        "torch_gpt2.parallel.tensor_parallel._sum_parts",
        lambda out, parts, group: out.copy_(parts.chunk(group.size())[group.rank()]),
    )
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"model_parallel": 2},
    "sequence": {"model_parallel": 2, "sequence_parallel": True},
    "data": {"zero_stage": 1},
    "pipeline": {"pipeline_stage": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks(layout: str) -> None:
    sizes: dict[str, Any] = {f"model__{key}": value for key, value in (SIZES | {"dropout": RATE}).items()}
    train = {"max_steps": 1, "micro_batch_size": BATCH}
    config = tiny_config(ranks=RANKS, train=train, parallel=LAYOUTS[layout], **sizes)
    masks = [masks_of(config, rank) for rank in range(RANKS)]
    for of_rank in masks:
        for mask in of_rank.values():
            assert_mean(mask, 1 - RATE)
            if mask.dtype != torch.bool:  # each key is dropped on its own
                assert mask.square().mean().item() == pytest.approx(1.0, rel=0.5)
        # layers, branches and micro batches
        for one, other in itertools.combinations(of_rank.values(), 2):
            if (one.shape, one.dtype) == (other.shape, other.dtype):
                assert_independent(one, other)
    at = [config.topology.coordinates(rank) for rank in range(RANKS)]
    for one, other in itertools.combinations(range(RANKS), 2):
        same_stage = (at[one].data, at[one].pipeline) == (at[other].data, at[other].pipeline)
        for name in masks[one].keys() & masks[other].keys():
            if same_stage and layout != "sequence" and "heads" not in name:
                assert torch.equal(masks[one][name], masks[other][name]), (name, one, other)
            else:
                assert_independent(masks[one][name], masks[other][name])
    again = masks_of(config, 3)  # a second run draws the same
    assert all(torch.equal(again[name], mask) for name, mask in masks[3].items())

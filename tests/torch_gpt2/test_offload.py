"""train.offload_activations: the host holds what blocks keep, and no bit of a step changes.

On a CPU the same hooks copy from the host to the host. npu_checks.py has them on a device with pinned memory.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from common.accelerators import require_accelerator
from common.config.load import build_config
from common.errors import ConfigError
from common.parallel.run import Run
from common.planner.plan import describe_plan, make_plan, time_of
from common.resolve.derive import resolve_mode
from tests.tiny import tiny_run
from tests.torch_gpt2.test_planner import build as planned, make, peaks
from torch_gpt2 import offload
from torch_gpt2.compilation import compile_model
from torch_gpt2.device import check_support, select_device
from torch_gpt2.model import GPT2
from torch_gpt2.offload import HostMemory

MODES = ("none", "selective", "full")


def build(config: Run, memory: HostMemory | None) -> GPT2:
    torch.manual_seed(0)
    model = planned(config)
    model.host_memory = memory
    return model


def step(model: GPT2, loss_sum: Callable[[Tensor, Tensor], Tensor] | None = None) -> list[Tensor]:
    """Loss and gradients of a batch."""
    ids = torch.arange(120).view(3, 40) % 101
    torch.manual_seed(1)
    loss = (loss_sum or model.loss_sum)(ids, ids + 1)
    return [loss, *torch.autograd.grad(loss, [*model.parameters()])]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("precision", ["float32", "bf16", {"parameters": "bfloat16"}])
def test_the_host_takes_the_plan_s_bytes_and_no_bit_changes(precision: Any, recompute: str) -> None:
    """To the byte without dropout, whose masks have other sizes on a CPU; with bf16 also where
    weights are rounded once for two micro batches.
    """
    for dropout, micro_batches in ((0.0, 1), (0.1, 1), (0.0, 2)):
        train = {"recompute": recompute, "offload_activations": True, "accumulation_steps": micro_batches}
        config = make(precision=precision, model={"dropout": dropout}, train=train)
        memory = HostMemory(pinned=False)
        assert same(step(build(config, None)), step(build(config, memory)))
        if not dropout:
            (stage,) = make_plan(config).stages
            assert memory.moved == stage.on_host > 0
    assert config.rounds_weights_once == (precision == "bf16")


def test_the_mask_that_all_blocks_share_stays() -> None:
    data = {"reset_position_ids": True, "reset_attention_mask": True, "eod_id": 0}
    config = make(model={"dropout": 0.0}, data=data, train={"offload_activations": True})
    memory = HostMemory(pinned=False)
    assert same(step(build(config, None)), step(build(config, memory)))
    # with a mask, attention on a CPU keeps other numbers than the plan's fused kernel
    mask = 3 * 40 * 40 * 4
    assert memory.moved < make_plan(config).stages[0].on_host + 4 * mask


def test_a_storage_is_copied_once_and_not_taken_for_one_that_is_gone() -> None:
    """torch gives freed memory to the next tensor, so equal addresses mean nothing."""
    memory, block = HostMemory(pinned=False), torch.nn.Linear(2, 2)
    x = torch.full((64,), 3.0, requires_grad=True)
    with memory.of_block(block):
        y = x * 1.0
        doubled = (y * y).sum() + (y[:32] * y[32:]).sum()
        assert memory.moved == y.nbytes
        for value in (2.0, 5.0):
            made = x * value  # each one in the memory of the one before
            doubled = doubled + made.square().sum()
            del made
    assert memory.moved == 3 * y.nbytes
    doubled.backward()  # type: ignore[no-untyped-call]
    # of y^2, of y[:32] y[32:], of (2x)^2 and (5x)^2
    wanted = torch.full((64,), 2 * 3.0 + 3.0 + 8 * 3.0 + 50 * 3.0)
    assert x.grad is not None and torch.equal(x.grad, wanted)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_keep_theirs_on_the_host_too(recompute: str) -> None:
    train = {"recompute": recompute, "offload_activations": True, "compile": True}
    config = make(precision="bf16", model={"dropout": 0.0}, train=train)
    found, memory = [], HostMemory(pinned=False)
    for each in (None, memory):
        torch._dynamo.reset()
        model = build(config, each)
        with patch("torch_gpt2.compilation.BACKEND", "aot_eager"):
            found.append(step(model, compile_model([model], config)))
    assert same(*found) and memory.moved > 0


class Elsewhere(offload._Copy):
    """A copy on a host that MemTracker tells from the device: without contents."""

    def __init__(self, content: Tensor, *, pinned: bool) -> None:
        self._device, self._back, self.uses = content.device, None, 0
        self._host = torch.empty(content.shape, dtype=content.dtype, device="meta")

    def fetch(self) -> Tensor:
        if self._back is None:
            self._back = torch.empty(self._host.shape, dtype=torch.uint8, device=self._device)
        back, self.uses = self._back, self.uses - 1
        self._back = back if self.uses else None
        return back


@pytest.mark.parametrize("recompute", MODES)
def test_the_device_s_peak_falls_as_the_plan_says(recompute: str) -> None:
    """Within 5 %; the host's peak to the byte."""
    model = {"num_layers": 3, "hidden_size": 512, "seq_length": 512, "vocab_size": 500}
    train = {"micro_batch_size": 16, "accumulation_steps": 2, "recompute": recompute}
    kept, moved = (
        make(model={**model, "dropout": 0.0}, train={**train, "offload_activations": each}) for each in (False, True)
    )
    before, plan = peaks(kept), make_plan(kept).stages[0]
    with patch.object(offload, "_Copy", Elsewhere):
        after, other = peaks(moved), make_plan(moved).stages[0]
    assert after["meta"] == other.on_host and plan.on_host == 0
    assert plan.peak - other.peak == pytest.approx(before["cpu"] - after["cpu"], rel=0.05)


def test_the_plan_names_both_memories_and_the_time() -> None:
    config, moved = (make(train={"offload_activations": each}) for each in (False, True))
    plan, device = make_plan(moved), require_accelerator("H100")
    assert "On the host a rank keeps 0.00 GiB" in describe_plan(plan)
    # there and back over 25 GB/s
    assert time_of(plan, device).host == 2 * plan.stages[0].on_host / 25e9
    assert time_of(make_plan(config), device).host == 0


def test_a_pipeline_keeps_each_waiting_micro_batch_on_the_host() -> None:
    """Four wait in the first of two stages with gpipe, and each stage has two of the layers."""
    parallel = {"pipeline_stage": 2, "pipeline_schedule": "gpipe"}
    train = {"accumulation_steps": 4, "recompute": "full"}
    kept, moved = (
        make_plan(make(2, parallel=parallel, train={**train, "offload_activations": each})) for each in (False, True)
    )
    residual = 3 * 40 * 48 * 4
    assert [stage.on_host for stage in moved.stages] == [4 * 2 * residual] * 2
    pairs = zip(kept.stages, moved.stages, strict=True)
    falls = [one.activations - other.activations for one, other in pairs]
    # the last stage keeps what it received on the device, where its first block has it
    assert falls == [4 * 2 * residual, 4 * residual]


def test_a_cpu_refuses_and_evaluates_a_run_folder() -> None:
    config = build_config(tiny_run(train__offload_activations=True))
    with pytest.raises(ConfigError, match="on a CPU they are there already; leave it out"):
        check_support(resolve_mode(config, "train", world_size=1), select_device("cpu"))
    for mode in ("eval", "predict", "export"):
        check_support(resolve_mode(config, mode, world_size=1), select_device("cpu"))

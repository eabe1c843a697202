"""Replicas of the model: gradients summed over them (DDP), or parameters, gradients and optimizer
state split over them (FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common.parallel.resolved_run import ResolvedRun
from common.parallel.topology import GroupKind
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.model import GPT2
from torch_gpt2.optimizer import sum_in_float32
from torch_gpt2.parallel.world import World

LossSum = Callable[[Tensor, Tensor], Tensor]


def shard_model(model: GPT2, config: ResolvedRun, mesh: DeviceMesh) -> None:
    """ZeRO: each rank of the data axis keeps its rows of every parameter, and all that follows from
    them.

    Stages 1 and 2 keep the gathered parameters until the last backward pass of a step, stage 3
    gathers a block for every pass. A pipeline keeps them in any stage: torch's schedules let go of
    nothing between backward passes, so that stage 3 would gather in vain. Weights below float32 are
    the gathered copies of float32 ones.
    """
    precision = config.precision
    low = DTYPES[precision.parameters] if precision.parameters != "float32" else None
    policy = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=DTYPES[precision.reduction], cast_forward_inputs=False
    )
    reshard = config.parallel.zero_stage == 3 and config.parallel.pipeline_stage == 1
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # the head needs the embedding after it
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if low is not None and precision.reduction == "float32":
        model.register_forward_pre_hook(_sum_tied_gradients_in_float32)


def _sum_tied_gradients_in_float32(model: nn.Module, _: Any) -> None:
    """Runs when ZeRO has gathered the parameters outside the blocks. The token table among them has
    two uses.
    """
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):  # those of the blocks are still split
            sum_in_float32(parameter)


def data_mesh(config: ResolvedRun, world: World, device: TorchDevice) -> DeviceMesh:
    """The ranks of the data axis; where shard_size is smaller, one row for each copy of the model.
    Call it once, on every rank.
    """
    size = config.parallel.shard_size or world.topology.data
    if size == world.topology.data:
        return DeviceMesh.from_group(world.groups[GroupKind.DATA], device.kind)
    found: list[dist.ProcessGroup] = []
    rows = torch.empty(0)
    for ranks in world.topology.groups(GroupKind.DATA):
        grid = torch.tensor(ranks).view(-1, size)
        # every process makes every group: those of copies, and those of shards
        for members in (*grid.t().tolist(), *grid.tolist()):
            group = dist.new_group(members)
            if world.rank in members:
                found.append(group)
        rows = grid if world.rank in ranks else rows
    return DeviceMesh.from_group(found, device.kind, mesh=rows, mesh_dim_names=("copies", "shards"))


def _sharded(model: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class DataParallel:
    """The loss of a micro batch whose gradients are summed over the data-parallel ranks.

    DDP does so while the last micro batch of a step goes backward, FSDP in ZeRO stages 2 and 3
    while each does. Where neither can (weights below float32 whose gradients are summed in float32
    outside the parameters; pipelines) ``sum_gradients`` does it after that.
    """

    def __init__(
        self, parts: list[GPT2], loss_sum: LossSum, config: ResolvedRun, world: World
    ) -> None:
        precision, self._parts = config.precision, parts
        self._stage = config.parallel.zero_stage
        self._group = world.groups.get(GroupKind.DATA)
        self._ddp: DistributedDataParallel | None = None
        self.loss_sum = loss_sum
        late = config.parallel.pipeline_stage > 1 or (
            precision.parameters != "float32" and precision.reduction == "float32"
        )
        self._afterwards = self._group is not None and not self._stage and late
        if self._group is not None and not self._stage and not late:
            self._ddp = self.loss_sum = DistributedDataParallel(
                _Loss(parts[0], loss_sum),
                gradient_as_bucket_view=True,
                init_sync=False,
                process_group=self._group,
            )
            state = (DTYPES[precision.reduction], self._group)
            # DDP would read annotations as classes
            self._ddp.register_comm_hook(state, lambda state, bucket: _sum_bucket(state, bucket))
            self._warm_up_buckets(config)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """For forward and backward of one micro batch; ranks exchange gradients after the ``last``,
        in ZeRO stages 2 and 3 after each. After the last one, in stage 3 after each, a rank again
        has its own part of the parameters alone.
        """
        if self._stage:
            for part in self._parts:
                assert isinstance(part, FSDPModule)
                part.set_requires_gradient_sync(last or self._stage > 1)
                part.set_requires_all_reduce(last)  # between the copies of hybrid sharding
                part.set_reshard_after_backward(last or self._stage == 3)
        return self._ddp.no_sync() if self._ddp is not None and not last else nullcontext()

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Call when all micro batches are done."""
        if self._afterwards:
            sum_over(self._group, gradients)

    def norm(self, own: Tensor) -> Tensor:
        """The global norm, from that of the gradients this rank has."""
        return own

    def update(self, step: Callable[[], Any]) -> None:
        """Take a step of the optimizer."""
        step()

    def _warm_up_buckets(self, config: ResolvedRun) -> None:
        """DDP sorts gradients into buckets anew after its first step, and the bucket decides in
        which order ranks are summed: from three ranks on, the first step of a resumed run would
        differ in the last bit. So that step is made here, and thrown away.
        """
        assert self._ddp is not None
        shape = (config.train.micro_batch_size, config.model.seq_length)
        ids = torch.zeros(shape, dtype=torch.int64, device=self._ddp.device)
        self._ddp.module.train()
        self._ddp(ids, ids).backward()
        self._ddp.zero_grad(set_to_none=True)


def sum_over(group: dist.ProcessGroup | None, gradients: Iterable[Tensor]) -> None:
    """In place, all under way at once."""
    for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
        assert work is not None
        work.wait()


def _sum_bucket(
    state: tuple[torch.dtype, dist.ProcessGroup], bucket: Any
) -> torch.futures.Future[Tensor]:
    """Sums where DDP would average, in ``dtype``: a micro batch then has the same gradient, and
    overflows at the same loss scale, on any number of ranks.
    """
    dtype, group = state
    sent: torch.futures.Future[list[Tensor]] = dist.all_reduce(
        bucket.buffer().to(dtype), group=group, async_op=True
    ).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class _Loss(nn.Module):
    """DDP watches the parameters of a module, and its forward."""

    def __init__(self, model: nn.Module, loss_sum: LossSum) -> None:
        super().__init__()
        self.model = model
        self._loss_sum = loss_sum

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self._loss_sum(ids, targets)

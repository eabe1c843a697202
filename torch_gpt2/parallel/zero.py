"""ZeRO: parameters, gradients and optimizer state split over the replicas, by FSDP2.

Importing FSDP2 takes half a second, so this file is imported only for such layouts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common.parallel.run import Run
from common.parallel.topology import GroupKind
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.world import World


def shard_model(model: GPT2, config: Run, mesh: DeviceMesh) -> None:
    """Apply ZeRO: each rank of the data axis keeps its rows of every parameter, gradient and moment.

    Stages 1 and 2 keep the gathered parameters until the last backward pass of a step. Stage 3 gathers a block for
    every pass. A pipeline keeps them in any stage: torch's schedules release nothing between backward passes, so stage
    3 would gather in vain. Weights below float32 are gathered copies of float32 weights.
    """
    precision = config.precision
    low = DTYPES[precision.parameters] if precision.parameters != "float32" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=DTYPES[precision.reduction], cast_forward_inputs=False)
    reshard = config.parallel.zero_stage == 3 and config.parallel.pipeline_stage == 1
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # the head needs the embedding after it
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in (each for each in model.modules() if isinstance(each, FSDPModule)):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if low is not None and precision.reduction == "float32":

        def sum_tied_gradients_in_float32(gathered: Any, _: Any) -> None:
            # the parameters outside the blocks are there now, among them the token table with its two uses
            for parameter in gathered.parameters():
                if not isinstance(parameter, DTensor):  # parameters of the blocks are still split
                    parameter.grad_dtype = torch.float32

        model.register_forward_pre_hook(sum_tied_gradients_in_float32)


def data_mesh(config: Run, world: World, device: TorchDevice) -> DeviceMesh:
    """Return the ranks of the data axis. With a smaller shard_size each row is one copy of the model.

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

"""Apply a parallel layout to the model (``build_parts``)."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from common.parallel.kernels import loss_rows
from common.parallel.run import Run
from common.parallel.sharding import Role, owns, role_of
from common.parallel.topology import GroupKind
from common.weights.names import EMBEDDING
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.model import GPT2, set_fused_attention, set_offload, set_packing, set_recompute
from torch_gpt2.optimizer import global_norm
from torch_gpt2.parallel.data_parallel import sum_over
from torch_gpt2.parallel.pipeline_parallel import keep_stage
from torch_gpt2.parallel.tensor_parallel import TensorGroup, split_model
from torch_gpt2.parallel.world import World


def build_parts(config: Run, device: TorchDevice, world: World) -> list[GPT2]:
    """Return this rank's parts of the model, one for each of its pipeline stages, without weights.

    Parts are cut before they have memory, so that a rank never holds more than its own.
    """
    topology = world.topology
    zero = import_module("torch_gpt2.parallel.zero") if config.parallel.zero_stage else None
    mesh = zero.data_mesh(config, world, device) if zero else None
    parts = []
    for stage in topology.stages_of(world.at.pipeline):
        with torch.device("meta"):
            model = GPT2(config.model, config.precision, config.vocab_rows)
        if topology.stages > 1:
            keep_stage(model, stage, topology)
        if topology.tensor > 1:
            group = TensorGroup(
                group=world.groups[GroupKind.TENSOR],
                rank=world.at.tensor,
                size=topology.tensor,
                sequence=config.parallel.sequence_parallel,
                asynchronous=config.parallel.async_tensor_parallel,
            )
            split_model(model, group, device)
        set_fused_attention(model, config)
        set_recompute(model, config.train.recompute, config.train.recompute_layers)
        set_offload(model, config, device)
        set_packing(model, config, device)
        model.loss_rows = loss_rows(config, device.total_memory())
        if zero:
            zero.shard_model(model, config, mesh)
        else:
            model.to(DTYPES[config.precision.parameters])
        parts.append(model.to_empty(device=device.torch_device))
    if len(parts) > 1 and hasattr(parts[0], "wte") and hasattr(parts[-1], "wte"):
        # first and last stage on one rank share the table
        parts[-1].wte.weight = parts[0].wte.weight
    return parts


def seed_offset(config: Run, world: World) -> int:
    """Return the offset of the dropout seed. Ranks with the same offset draw the same masks.

    These are the ranks of a tensor group, unless each has its own part of the sequence.
    """
    return world.rank if config.parallel.sequence_parallel else world.rank - world.at.tensor


class GradientSync:
    """Gradient reductions beyond the data axis, and the global gradient norm."""

    def __init__(self, config: Run, world: World) -> None:
        self._world = world
        self._sequence = config.parallel.sequence_parallel and world.topology.tensor > 1
        self._copies_of_embedding = world.groups.get(GroupKind.EMBEDDING)
        self.alone = config.parallel.zero_stage == 0 and world.topology.tensor == world.topology.pipeline == 1
        self.owns = partial(owns, config.parallel, world.topology, world.at)
        """Whether this rank represents its part of a parameter, which other ranks may hold too."""

    def complete(self, gradients: dict[str, Tensor]) -> None:
        """Sum, in place, the partial gradients of the tensor and embedding groups."""
        if self._sequence:
            parts = [gradient for name, gradient in gradients.items() if role_of(name) is Role.REPLICATED]
            sum_over(self._world.groups[GroupKind.TENSOR], parts)
        if self._copies_of_embedding is not None and EMBEDDING in gradients:
            sum_over(self._copies_of_embedding, [gradients[EMBEDDING]])

    def norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Euclidean norm over the gradients of all ranks, each element counted once; scalar of ``wide_type``."""
        mine = [gradient for name, gradient in gradients.items() if self.owns(name) and gradient.numel()]
        own = global_norm(mine) if mine else next(iter(gradients.values())).new_zeros(())
        return self._world.total(own, power=2).sqrt()

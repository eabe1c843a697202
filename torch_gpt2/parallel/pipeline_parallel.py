"""Pipeline parallel: the layers of a stage, and torch.distributed.pipelining's schedules over the
micro batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from common.parallel.resolved_run import ResolvedRun
from common.parallel.topology import GroupKind, Topology
from torch_gpt2.device import TorchDevice
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.private_api import FrugalStage
from torch_gpt2.parallel.world import World

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}


def keep_stage(model: GPT2, stage: int, topology: Topology) -> None:
    """Leave of a model what one stage holds, under the names that it has in the whole. Its forward
    takes and gives hidden states where token ids, or what the head needs, are another stage's.
    """
    layers = topology.layers_of_stage(stage, model.config.num_layers)
    for name, _ in list(model.h.named_children()):
        if int(name) not in layers:
            delattr(model.h, name)  # del model.h[i] would number the others anew
    first, last = stage == 0, stage == topology.stages - 1
    if not first:
        del model.wpe
        model.begin = _unchanged  # type: ignore[method-assign, assignment]
    if not last:
        model.ln_f = nn.Identity()  # type: ignore[assignment]
    if not first and not last:
        del model.wte


def _unchanged(x: Tensor) -> Tensor:
    return x


class Pipeline:
    """All stages of this rank, and how a step goes through them. All pipeline ranks give ``step``
    and ``evaluate`` the same batch.
    """

    def __init__(
        self, parts: list[GPT2], config: ResolvedRun, world: World, device: TorchDevice
    ) -> None:
        self._topology = world.topology
        self._count = world.topology.stages
        self._parts = dict(zip(world.topology.stages_of(world.at.pipeline), parts, strict=True))
        self._group, self._device = world.groups[GroupKind.PIPELINE], device.torch_device
        self._ranks = list(world.topology.group(GroupKind.PIPELINE, world.rank))
        self._config = config
        self.has_loss = self._count - 1 in self._parts
        micro_batches = config.train.accumulation_steps
        made = [
            FrugalStage(part, index, self._count, self._device, group=self._group)
            for index, part in self._parts.items()
        ]
        kind = _SCHEDULES[config.parallel.pipeline_schedule]
        if kind is Schedule1F1B and micro_batches < world.topology.pipeline:  # too few to alternate
            kind = ScheduleGPipe
        one_stage = kind in (ScheduleGPipe, Schedule1F1B)
        self._schedule = kind(
            made[0] if one_stage else made, micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self._finish: Callable[[Tensor], Tensor] = lambda loss: loss

    def step(self, ids: Tensor, targets: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        """Gradients of ``finish(sum of the losses)`` of all micro batches; that sum of what finish
        returned, 0 where the head is not.
        """
        self._finish = finish
        losses: list[Tensor] = []
        inputs = (ids,) if 0 in self._parts else ()
        if self.has_loss:
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
            return torch.stack([loss.detach() for loss in losses]).sum()
        self._schedule.step(*inputs)
        return torch.zeros((), device=self._device)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self._finish(self._parts[self._count - 1].loss_of(hidden, targets))

    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of one batch of any size, 0 where the head is not."""
        x = ids
        for index, part in sorted(self._parts.items()):
            if index > 0 and index - 1 not in self._parts:
                x = torch.empty(self._shape(ids), dtype=part.compute_dtype, device=self._device)
                dist.recv(x, self._rank_of(index - 1), group=self._group)
            x = part(x)
            if index < self._count - 1 and index + 1 not in self._parts:
                dist.send(x.contiguous(), self._rank_of(index + 1), group=self._group)
        return (
            self._parts[self._count - 1].loss_of(x, targets)
            if self.has_loss
            else torch.zeros((), device=self._device)
        )

    def _shape(self, ids: Tensor) -> tuple[int, int, int]:
        parallel = self._config.parallel
        width = ids.shape[1] // (parallel.model_parallel if parallel.sequence_parallel else 1)
        return ids.shape[0], width, self._config.model.hidden_size

    def _rank_of(self, stage: int) -> int:
        return self._ranks[self._topology.place_of_stage(stage)]

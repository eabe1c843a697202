"""Pipeline parallel: the layers of a stage, and the schedules for the micro batches of a step.

The schedules are those of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.parallel.run import Run
from common.parallel.topology import GroupKind, Topology
from torch_gpt2.device import TorchDevice
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.world import World

_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
}


def keep_stage(model: GPT2, stage: int, topology: Topology) -> None:
    """Reduce a model to the layers of one stage, under their names in the whole model.

    Its forward takes hidden states unless it has the embedding, and returns hidden states unless it has the head.
    """
    layers = topology.layers_of_stage(stage, model.config.num_layers)
    for name, _ in list(model.h.named_children()):
        if int(name) not in layers:
            delattr(model.h, name)  # del model.h[i] would renumber the others
    first, last = stage == 0, stage == topology.stages - 1
    if not first:
        del model.wpe
        model.begin = lambda x, tokens=None: x  # type: ignore[method-assign, assignment]
    if not last:
        model.ln_f = nn.Identity()  # type: ignore[assignment]
    if not first and not last:
        del model.wte


class Pipeline:
    """All stages of this rank, and the schedule of a step.

    All pipeline ranks pass the same batch to ``step`` and ``evaluate``.
    """

    def __init__(self, parts: list[GPT2], config: Run, world: World, device: TorchDevice) -> None:
        self._topology = world.topology
        self._count = world.topology.stages
        self._parts = dict(zip(world.topology.stages_of(world.at.pipeline), parts, strict=True))
        self._group, self._device = world.groups[GroupKind.PIPELINE], device.torch_device
        self._ranks = list(world.topology.group(GroupKind.PIPELINE, world.rank))
        self._config = config
        self._has_loss = self._count - 1 in self._parts
        self._micro_batches = config.train.accumulation_steps
        self._schedule = self._make_schedule(self._micro_batches)
        self._finish: Callable[[Tensor], Tensor] = lambda loss: loss

    def _make_schedule(self, micro_batches: int) -> Any:
        """Return the schedule of a step with so many micro batches, with stages of its own, which
        keep buffers for each of them.
        """
        # importing torch's pipelining takes half a second, and most layouts have no pipeline
        pipelining = import_module("torch.distributed.pipelining")
        frugal_stage = import_module("torch_gpt2.parallel.private_api").FrugalStage
        made = [
            frugal_stage(part, index, self._count, self._device, group=self._group)
            for index, part in self._parts.items()
        ]
        self._stages = made
        name = self._config.parallel.pipeline_schedule
        if name == "1f1b" and micro_batches < self._topology.pipeline:
            name = "gpipe"  # too few micro batches to alternate
        one_stage = name in ("gpipe", "1f1b")
        return getattr(pipelining, _SCHEDULES[name])(
            made[0] if one_stage else made, micro_batches, loss_fn=self._loss, scale_grads=False
        )

    def step(
        self, ids: Tensor, targets: Tensor, finish: Callable[[Tensor], Tensor], watch: Callable[[int | None], None]
    ) -> Tensor:
        """Compute the gradients of ``finish(sum of the losses)`` of all micro batches.

        watch: called around each forward pass, with the number of its micro batch and then with
        None. Returns the sum of the results of ``finish``, or 0 without the head.
        """
        micro_batches = len(ids) // self._config.train.micro_batch_size
        if micro_batches != self._micro_batches:
            self._schedule = self._make_schedule(micro_batches)
            self._micro_batches = micro_batches
        for stage in self._stages:
            stage.watch = watch
        self._finish = finish
        losses: list[Tensor] = []
        inputs, more = (ids,) if 0 in self._parts else (), self._tokens(ids)
        if self._has_loss:
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False, **more)
            return torch.stack([loss.detach() for loss in losses]).sum()
        self._schedule.step(*inputs, **more)
        return torch.zeros((), device=self._device)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self._finish(self._parts[self._count - 1].loss_of(hidden, targets))

    def evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of one batch of any size, 0 without the head."""
        x, parallel = ids, self._config.parallel
        for index, part in sorted(self._parts.items()):
            if index > 0 and index - 1 not in self._parts:
                width = ids.shape[1] // (parallel.model_parallel if parallel.sequence_parallel else 1)
                shape = len(ids), width, self._config.model.hidden_size
                x = torch.empty(shape, dtype=part.compute_dtype, device=self._device)
                dist.recv(x, self._rank_of(index - 1), group=self._group)
            x = part(x, **self._tokens(ids))
            if index < self._count - 1 and index + 1 not in self._parts:
                dist.send(x.contiguous(), self._rank_of(index + 1), group=self._group)
        return (
            self._parts[self._count - 1].loss_of(x, targets) if self._has_loss else torch.zeros((), device=self._device)
        )

    def _tokens(self, ids: Tensor) -> dict[str, Tensor]:
        """Return what each stage gets beside its input, to keep documents apart."""
        packing = self._config.packing
        return {"tokens": ids} if packing is not None and packing.separates else {}

    def _rank_of(self, stage: int) -> int:
        return self._ranks[self._topology.place_of_stage(stage)]

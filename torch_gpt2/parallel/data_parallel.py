"""Replicas of the model: their gradients are summed, by DDP or by FSDP2 (zero.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.parallel.run import Run
from common.parallel.topology import GroupKind
from torch_gpt2.data import split
from torch_gpt2.device import DTYPES
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.world import World

LossSum = Callable[[Tensor, Tensor], Tensor]


class DataParallel:
    """Loss of a micro batch whose gradients are summed over the data-parallel ranks.

    DDP sums while the last micro batch of a step goes backward. FSDP in ZeRO stages 2 and 3 sums
    while each does. ``sum_gradients`` does it afterwards where neither can: with a pipeline, and
    for weights below float32 whose gradients are summed in float32 outside the parameters.
    """

    def __init__(self, parts: list[GPT2], loss_sum: LossSum, config: Run, world: World) -> None:
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
                LossModule(parts[0], loss_sum), gradient_as_bucket_view=True, init_sync=False, process_group=self._group
            )
            dtype, group = DTYPES[precision.reduction], self._group

            def sum_bucket(_, bucket):  # type: ignore[no-untyped-def]  # DDP would read annotations as classes
                """Sum gradients in ``dtype``, where DDP would average them.

                A micro batch then has the same gradient, and overflows at the same loss scale, on any number of ranks.
                """
                sent = dist.all_reduce(bucket.buffer().to(dtype), group=group, async_op=True).get_future()
                return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))

            self._ddp.register_comm_hook(None, sum_bucket)
            self._warm_up_buckets(config)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of forward and backward of one micro batch.

        Ranks exchange gradients after the ``last`` micro batch, in ZeRO stages 2 and 3 after each. After the last one,
        in stage 3 after each, a rank again has only its own part of the parameters.
        """
        if self._stage:
            part: Any  # an FSDPModule
            for part in self._parts:
                part.set_requires_gradient_sync(last or self._stage > 1)
                part.set_requires_all_reduce(last)  # between the copies of hybrid sharding
                part.set_reshard_after_backward(last or self._stage == 3)
        return self._ddp.no_sync() if self._ddp is not None and not last else nullcontext()

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Sum the gradients over the ranks. Call it when all micro batches are done."""
        if self._afterwards:
            sum_over(self._group, gradients)

    def norm(self, own: Tensor) -> Tensor:
        """Return the global norm, given the norm of this rank's gradients."""
        return own

    def update(self, step: Callable[[], Any]) -> None:
        """Take a step of the optimizer."""
        step()

    def _warm_up_buckets(self, config: Run) -> None:
        """Make DDP's first step and discard it.

        DDP sorts gradients into buckets again after that step, and the bucket decides the order in which ranks are
        summed. From three ranks on, the first step of a resumed run would differ in the last bit.
        """
        assert self._ddp is not None
        shape = (config.train.micro_batch_size, config.model.seq_length + 1)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self._ddp.device)
        self._ddp.module.train()
        self._ddp(*split(tokens)).backward()
        self._ddp.zero_grad(set_to_none=True)


def sum_over(group: dist.ProcessGroup | None, gradients: Iterable[Tensor]) -> None:
    """Sum gradients over a group in place, with all messages in flight at once."""
    for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
        assert work is not None
        work.wait()


class LossModule(nn.Module):
    """Loss as a module, because DDP and DeepSpeed watch a module's parameters and its forward."""

    def __init__(self, model: nn.Module, loss: LossSum) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self._loss(ids, targets)

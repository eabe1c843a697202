"""Private interfaces of torch.distributed.pipelining that this backend uses.

They were read in torch 2.13.0. The package accepts 2.11 to 2.13, and a test names an interface that
is gone. ``PRIVATE`` gives the purpose of each, and the public way that would replace it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from torch_gpt2.quantize import forget_maxima

PRIVATE = {
    "torch.distributed.pipelining.PipelineStage._prepare_forward_infra": "buffers of messages from"
    " the stage before, one for each micro batch; no public replacement: a step keeps them all",
    "torch.distributed.pipelining.PipelineStage._create_grad_recv_info": "the same of gradients from the stage after",
    "torch.distributed.pipelining.PipelineStage._get_recv_ops": "the moment before a message is"
    " awaited; no public replacement",
    "torch.distributed.pipelining.PipelineStage._retrieve_recv_activations": "the moment when"
    " activations are used; no public replacement",
    "torch.distributed.pipelining.PipelineStage._retrieve_recv_grads": "the moment when gradients"
    " are used; no public replacement",
}
"""Purpose of each name, and its public replacement."""


class FrugalStage(PipelineStage):
    """Stage that has a buffer for a message only until the last pass that uses it ends.

    torch's stage always has a buffer for each micro batch of a step. Here an unused buffer is on the meta device, with
    only shape and type. The signatures are those of 2.13; arguments are passed on unread.
    """

    watch: Callable[[int | None], None] = staticmethod(lambda micro_batch: None)
    """Function that is called around each forward pass of a step, with the number of its micro
    batch and then with None.
    """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.watch(fwd_chunk_id)
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.watch(None)
        return result

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(1, *args, **kwargs)
        first = self.args_recv_info[0]
        self.args_recv_info = {number: _without_memory(first) for number in range(num_microbatches)}
        return result

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        forget_maxima(self.submod)  # torch has run the stage once on uninitialized memory
        return _without_memory(super()._create_grad_recv_info(act_send_info))

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[dist.P2POp]:
        for info in recv_infos:
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=info.buffer.requires_grad)
        return super()._get_recv_ops(recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self.args_recv_info[fwd_chunk_id] = _without_memory(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self.grad_recv_info[bwd_chunk_id] = _without_memory(self.grad_recv_info[bwd_chunk_id])
        return received

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            # The schedule keeps the loss until the end of the step. Its graph would keep the received activations.
            loss.detach_()


def _without_memory(messages: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the messages with buffers on the meta device. Messages from outside the pipeline have no buffer."""
    copies = tuple(copy.copy(message) for message in messages)
    for message in copies:
        if getattr(message, "buffer", None) is not None:
            message.buffer = torch.empty_like(message.buffer, device="meta", requires_grad=message.buffer.requires_grad)
    return copies

"""The other processes of a run: the group they form, what they agree on, and gradients summed over data-parallel ranks."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.cluster.environment import Process, torch_variables
from common.config.schema import RunConfig
from common.errors import ConfigError, DivergedError, GPT2Error, RunError, StopRequested
from torch_gpt2.device import DTYPES, TorchDevice

T = TypeVar("T")
LossSum = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class World:
    """All processes of the run. Every rank must call a method for any of them to return."""

    rank: int = 0
    size: int = 1

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64, the same bits on each."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def largest(self, value: int) -> int:
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides. Where that raises one of our errors, it is raised on every rank."""
        if self.size == 1:
            return decide()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = decide()
            except GPT2Error as error:
                answer[1] = error
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]  # type: ignore[no-any-return]

    def require_equal(self, facts: dict[str, Any]) -> None:
        """Raises ConfigError naming the first fact that differs between ranks, and the ranks."""
        gathered = self.gather(facts)
        for name in facts:
            odd = [rank for rank, theirs in enumerate(gathered) if repr(theirs[name]) != repr(gathered[0][name])]  # nan is not nan
            if odd:
                theirs, ours = gathered[odd[0]][name], gathered[0][name]
                raise ConfigError(
                    f"rank {odd[0]} differs from rank 0 in {name}: {theirs} and {ours}; every host must have the same config, the same"
                    " data, and one output_dir that all of them share"
                )


@contextmanager
def open_world(config: RunConfig, process: Process, device: TorchDevice) -> Iterator[World]:
    """Meet the other processes; nothing to do where there is one. Raises RunError when they cannot be reached, also later on."""
    if process.world_size == 1:
        yield World()
        return
    os.environ.update(torch_variables(process))
    # a little longer than the launcher waits, which knows better whom to blame
    limit = datetime.timedelta(seconds=config.runtime.stall_limit + 30)
    backends = "gloo" if device.kind == "cpu" else f"cpu:gloo,{device.kind}:{device.communication_backend}"
    try:
        dist.init_process_group(backends, timeout=limit)
        with _leaving_together():
            yield World(rank=process.rank, size=process.world_size)
    except (dist.DistError, RuntimeError) as error:
        if not _is_lost_contact(error):
            raise
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']} is taken; end what uses it, or set MASTER_PORT"
            ) from error
        reason = str(error).strip().partition("\n")[0].partition(" This is typically")[0]
        raise RunError(
            f"rank {process.rank}: no contact with the other ranks ({reason}); see the log of the one that failed first"
        ) from error
    dist.destroy_process_group()


@contextmanager
def _leaving_together() -> Iterator[None]:
    """Nobody leaves before rank 0 has saved, at the end of the run or after what every rank meets at the same step: rank 0 keeps the
    others' addresses, and launchers end a job as soon as one rank has left with a code other than 0."""
    try:
        yield
    except (StopRequested, DivergedError):
        dist.barrier()
        raise
    dist.barrier()


def _is_lost_contact(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting"))


class DataParallel:
    """The loss of a micro batch whose gradients are summed over all ranks.

    DDP does so while the last micro batch of a step goes backward. Of weights below float32, whose gradients are summed in float32
    outside the parameters, ``sum_gradients`` does it after that.
    """

    def __init__(self, model: nn.Module, loss_sum: LossSum, config: RunConfig, world: World) -> None:
        precision = config.precision
        self._afterwards = world.size > 1 and precision.parameters != "float32" and precision.reduction == "float32"
        self._ddp: DistributedDataParallel | None = None
        self.loss_sum = loss_sum
        if world.size > 1 and not self._afterwards:
            self._ddp = self.loss_sum = DistributedDataParallel(_Loss(model, loss_sum), gradient_as_bucket_view=True, init_sync=False)
            dtype = DTYPES[precision.reduction]
            self._ddp.register_comm_hook(dtype, lambda dtype, bucket: _sum_bucket(dtype, bucket))  # DDP would read annotations as classes
            self._settle(config)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """For forward and backward of one micro batch; only after the ``last`` one do ranks exchange gradients."""
        return self._ddp.no_sync() if self._ddp is not None and not last else nullcontext()

    def _settle(self, config: RunConfig) -> None:
        """DDP sorts gradients into buckets anew after its first step, and the bucket decides in which order ranks are summed: from three
        ranks on, the first step of a resumed run would differ in the last bit. So that step is made here, and thrown away."""
        assert self._ddp is not None and config.train.micro_batch_size is not None
        shape = (config.train.micro_batch_size, config.model.seq_length)
        ids = torch.zeros(shape, dtype=torch.int64, device=self._ddp.device)
        self._ddp.module.train()
        self._ddp(ids, ids).backward()
        self._ddp.zero_grad(set_to_none=True)

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Call when all micro batches are done."""
        if self._afterwards:
            for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
                work.wait()


def _sum_bucket(dtype: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """Sums where DDP would average, in ``dtype``: a micro batch then has the same gradient, and overflows at the same loss scale, on any
    number of ranks."""
    sent: torch.futures.Future[list[Tensor]] = dist.all_reduce(bucket.buffer().to(dtype), async_op=True).get_future()
    return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class _Loss(nn.Module):
    """DDP watches the parameters of a module, and its forward."""

    def __init__(self, model: nn.Module, loss_sum: LossSum) -> None:
        super().__init__()
        self.model = model
        self._loss_sum = loss_sum

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self._loss_sum(ids, targets)

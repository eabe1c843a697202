"""Alternatives to DDP, for comparison: a parameter server, and Horovod. See parallel.strategy.

Each is correct in every precision: the gradients and weights of ``MasterWeights`` travel in float32.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import ConfigError
from common.parallel.run import Run
from common.paths import install
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.model import GPT2
from torch_gpt2.parallel.data_parallel import DataParallel, LossSum
from torch_gpt2.parallel.world import World


class ParameterServer(DataParallel):
    """Rank 0 receives the sum of all gradients, updates the weights and sends them out.

    Only rank 0 has the optimizer's state.
    """

    def __init__(
        self, parts: list[GPT2], loss_sum: LossSum, config: Run, world: World, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__(parts, loss_sum, config, World())  # which has no groups to sum over
        self._world = world
        self._weights = weights
        self._dtype = DTYPES[config.precision.reduction]

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Sum the gradients on rank 0. Only rank 0 has the sums afterwards."""
        for gradient in gradients:
            sent = gradient.to(self._dtype)
            dist.reduce(sent, 0)
            if sent is not gradient:
                gradient.copy_(sent)

    def norm(self, own: Tensor) -> Tensor:
        """Return rank 0's norm, so that all ranks agree whether the step is applied."""
        dist.broadcast(own, 0)
        return own

    @torch.no_grad()
    def update(self, step: Callable[[], Any]) -> None:
        if self._world.rank == 0:
            step()
        for tensor in self._weights.values():
            dist.broadcast(tensor, 0)


class SingleProcessDataParallel(DataParallel):
    """torch.nn.DataParallel: one process splits each micro batch over all its devices.

    Device 0 keeps weights and state.
    """

    def __init__(self, model: GPT2, config: Run, world: World, device: TorchDevice) -> None:
        super().__init__([model], model.loss_sum, config, world)
        count = 1 if device.kind == "cpu" else int(device.module.device_count())
        replicas = nn.DataParallel(_ReplicaLoss(model), device_ids=list(range(count)) if count > 1 else None)
        if len(replicas.device_ids) < 2:  # otherwise DataParallel would silently use one device
            raise ConfigError(
                "parallel.strategy=parameter_server in one process needs several devices, found"
                f" {count} x {device.name}; start several processes, or set strategy=ddp"
            )
        self.loss_sum = lambda ids, targets: replicas(ids, targets).sum()


class Horovod(DataParallel):
    """Sum over all ranks by Horovod's all-reduce."""

    def __init__(
        self, parts: list[GPT2], loss_sum: LossSum, config: Run, world: World, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__(parts, loss_sum, config, World())  # which has no groups to sum over
        if importlib.util.find_spec("horovod") is None:
            raise ConfigError(
                "parallel.strategy=horovod: the package is not installed; HOROVOD_WITH_PYTORCH=1"
                f" {install('horovod')} builds it (for torch 2.13, with"
                " CMAKE_CXX_STANDARD 17 in its two CMakeLists.txt), or set strategy=ddp"
            )
        self._horovod: Any = importlib.import_module("horovod.torch")
        self._horovod.init()
        theirs = (self._horovod.rank(), self._horovod.size())
        if theirs != (world.rank, world.size):
            raise ConfigError(
                f"parallel.strategy=horovod: Horovod says rank {theirs[0]} of {theirs[1]}, this is"
                f" rank {world.rank} of {world.size}; start the run with horovodrun or mpirun"
            )
        self._weights: Mapping[str, Tensor] | None = weights
        self._half = DTYPES[config.precision.reduction]

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        if self._weights is not None:
            self._horovod.broadcast_parameters(dict(self._weights), root_rank=0)
            self._weights = None
        return nullcontext()

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        sent = [gradient.to(self._half) for gradient in gradients]
        summed = self._horovod.grouped_allreduce(sent, op=self._horovod.Sum, name="gradients")
        for gradient, total in zip(gradients, summed, strict=True):
            gradient.copy_(total)


class _ReplicaLoss(nn.Module):
    """Module whose forward uses the replica's model; a bound method would use the original."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss_sum(ids, targets).reshape(1)


def replicate(
    parts: list[GPT2], loss_sum: LossSum, config: Run, world: World, device: TorchDevice, weights: Mapping[str, Tensor]
) -> DataParallel:
    """Create the strategy that parallel.strategy names.

    weights: the float32 tensors that the optimizer updates. Raises ConfigError.
    """
    strategy = config.parallel.strategy
    if strategy == "ddp":
        return DataParallel(parts, loss_sum, config, world)
    if strategy == "parameter_server" and world.size == 1:
        return SingleProcessDataParallel(parts[0], config, world, device)
    kind = Horovod if strategy == "horovod" else ParameterServer
    return kind(parts, loss_sum, config, world, weights)

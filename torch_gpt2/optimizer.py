"""Optimizers over named parameters: decay and no-decay groups, float32 copies of low-precision
weights, gradients and their norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.config.schema import OptimizerConfig
from common.weights.names import decays
from torch_gpt2.private_api import foreach_multiply, foreach_norm


class MasterWeights:
    """The float32 tensors that the optimizer updates: the parameters themselves, or copies of those
    held in fewer bits.
    Fill ``tensors`` and then ``write_back``: the copies hold more than the model's rounded weights
    do.

    With copies, the backward pass sums gradients in float32 (over micro batches, and over the uses
    of a tied table), unless ``reduction`` is the parameters' own type.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], reduction: torch.dtype) -> None:
        self.model = dict(parameters)
        self.tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if parameter.dtype == torch.float32:
                self.tensors[name] = parameter
                continue
            self.tensors[name] = parameter.detach().float()
            if reduction == torch.float32:
                sum_in_float32(parameter)

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients of the float32 tensors by name, this rank's part of them, once all micro
        batches are done.
        """
        for name, tensor in self.tensors.items():
            parameter = self.model[name]
            if tensor is not parameter and parameter.grad is not None:
                tensor.grad, parameter.grad = parameter.grad.float(), None
        return {
            name: local_shard(tensor.grad)
            for name, tensor in self.tensors.items()
            if tensor.grad is not None
        }

    def write_back(self) -> None:
        """Round the float32 tensors into the model."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if tensor is not self.model[name]:
                    self.model[name].copy_(tensor)


def sum_in_float32(parameter: Tensor) -> None:
    """Let autograd keep and sum the gradient of a leaf in float32, whatever type the leaf has. It
    would otherwise round each sum.
    """
    parameter.grad_dtype = torch.float32


def local_shard(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that ZeRO has split, in the same memory; any other tensor as
    it is.
    """
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_groups(
    tensors: Mapping[str, Tensor],
    config: OptimizerConfig,
    frozen: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Matrices and embeddings with decay; biases, layer norms and what is frozen without.

    Plain tensors and those split over ranks form groups of their own, since torch's loops over
    lists (foreach) take no list of both.
    """
    groups = []
    for decay, split in itertools.product((True, False), repeat=2):
        members = [
            tensor
            for name, tensor in tensors.items()
            if (decays(name) and name not in frozen) is decay
            and isinstance(tensor, DTensor) is split
        ]
        if members:
            groups.append(
                {"params": members, "weight_decay": config.weight_decay if decay else 0.0}
            )
    return groups


def build_optimizer(
    tensors: Mapping[str, Tensor],
    config: OptimizerConfig,
    *,
    fused: bool,
    frozen: Collection[str] = (),
) -> torch.optim.Optimizer:
    """torch's own optimizer over ``parameter_groups``."""
    groups = parameter_groups(tensors, config, frozen)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    # fused=False would also keep torch from choosing foreach
    return kind(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=fused or None,
    )


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm over all gradients together, float32 scalar."""
    on_cpu = gradients[0].device.type == "cpu"
    norms = (
        [_norm_by_rows(gradient) for gradient in gradients] if on_cpu else foreach_norm(gradients)
    )
    total: Tensor = torch.stack(norms).norm().float()
    return total


def _norm_by_rows(gradient: Tensor, row: int = 1024) -> Tensor:
    """Float64 scalar. On a CPU torch adds squares one after the other in float32, which loses 1e-3
    of a table of 39 million. Short rows lose next to nothing and take no longer.
    """
    values = gradient.reshape(-1)
    full = len(values) // row * row
    norms = torch.linalg.vector_norm(values[:full].view(-1, row), dim=1)
    rest = torch.linalg.vector_norm(values[full:])
    total: Tensor = torch.cat([norms, rest[None]]).double().norm()
    return total


def scale_gradients(gradients: list[Tensor], factor: float) -> None:
    if factor != 1.0:
        foreach_multiply(gradients, factor)

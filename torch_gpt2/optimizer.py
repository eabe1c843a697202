"""Optimizers over named parameters: decay and no-decay groups, float32 copies of low-precision weights, gradients and their norm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from common.config.schema import OptimizerConfig
from common.weights.names import decays


class MasterWeights:
    """The float32 tensors that the optimizer updates: the parameters themselves, or copies of those held in fewer bits.
    Fill ``tensors`` and then ``write_back``: the copies hold more than the model's rounded weights do.

    With copies, gradients are summed in float32 as each micro batch's backward pass delivers them, unless
    ``reduction`` is the parameters' own type.
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
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]

    def take_gradients(self) -> list[Tensor]:
        """The gradients of the float32 tensors, once all micro batches are done."""
        for name in self.tensors:
            if self.tensors[name] is not self.model[name] and self.model[name].grad is not None:
                self._take_gradient(name)
        return [tensor.grad for tensor in self.tensors.values() if tensor.grad is not None]

    def write_back(self) -> None:
        """Round the float32 tensors into the model."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if tensor is not self.model[name]:
                    self.model[name].copy_(tensor)

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        self._take_gradient(name)

    def _take_gradient(self, name: str) -> None:
        parameter, master = self.model[name], self.tensors[name]
        assert parameter.grad is not None
        master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
        parameter.grad = None


def build_optimizer(tensors: Mapping[str, Tensor], config: OptimizerConfig, *, fused: bool) -> torch.optim.Optimizer:
    """torch's own optimizer over two groups: matrices and embeddings with decay; biases and layer norms without."""
    groups = [
        {"params": [tensor for name, tensor in tensors.items() if decays(name)], "weight_decay": config.weight_decay},
        {"params": [tensor for name, tensor in tensors.items() if not decays(name)], "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=fused)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm over all gradients together, float32 scalar."""
    norms: tuple[Tensor, ...] = torch._foreach_norm(gradients)
    total: Tensor = torch.stack(norms).norm()
    return total


def scale_gradients(gradients: list[Tensor], factor: float) -> None:
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)

"""Optimizers over named parameters, equal to torch's: decay and no-decay parameters, bias correction; gradients and their norm.

MindSpore's own do not serve: nn.AdamWeightDecay has no bias correction, and mint.optim.AdamW has no CPU kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from common.config.schema import OptimizerConfig
from common.training.snapshot import STATE_NAMES
from common.weights.names import decays


class Optimizer(nn.Cell):
    """One update of all parameters as one graph. ``state[part][name]`` holds the moments; ``steps`` counts the updates."""

    def __init__(self, tensors: Mapping[str, Parameter], config: OptimizerConfig) -> None:
        super().__init__(auto_prefix=False)
        self.settings = config
        self.steps = 0
        self.names = tuple(tensors)
        self.parameters = ms.ParameterTuple(tuple(tensors.values()))
        self.decay = tuple(config.weight_decay if decays(name) else 0.0 for name in tensors)
        parts = STATE_NAMES[config.name] if config.name != "sgd" or config.momentum else ()
        self.state = {part: _zeros(tensors, part) for part in parts}
        self.first = ms.ParameterTuple(tuple(self.state[parts[0]].values())) if parts else ()
        self.second = ms.ParameterTuple(tuple(self.state[parts[1]].values())) if len(parts) > 1 else ()
        self.assign = ops.Assign()

    def step(self, gradients: Sequence[Tensor], learning_rate: float, factor: float) -> None:
        """Update with ``gradients`` times ``factor``, which undoes the loss scale and clips."""
        self.steps += 1
        config = self.settings
        first = 1.0 - config.beta1**self.steps
        second = 1.0 - config.beta2**self.steps
        numbers = np.array([learning_rate, factor, learning_rate / first, 1.0 / np.sqrt(second), float(self.steps == 1)], np.float32)
        self(*(Tensor(number) for number in numbers), *gradients)

    def construct(self, rate: Tensor, factor: Tensor, step_size: Tensor, root: Tensor, is_first: Tensor, *gradients: Tensor) -> Tensor:
        # The gradients come one by one: a tuple of them would be a constant, and every step a new graph.
        for index, gradient in enumerate(gradients):
            parameter = self.parameters[index]
            gradient = gradient * factor
            if self.settings.name == "adamw":
                self.assign(parameter, parameter * (1.0 - rate * self.decay[index]))
            else:
                gradient = gradient + self.decay[index] * parameter
            if self.settings.name == "sgd":
                self._momentum(index, parameter, gradient, rate, is_first)
            else:
                self._adam(index, parameter, gradient, step_size, root)
        return rate

    def _adam(self, index: int, parameter: Parameter, gradient: Tensor, step_size: Tensor, root: Tensor) -> None:
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        first = self.first[index] + (gradient - self.first[index]) * (1.0 - beta1)
        second = self.second[index] * beta2 + gradient * gradient * (1.0 - beta2)
        self.assign(self.first[index], first)
        self.assign(self.second[index], second)
        self.assign(parameter, parameter - step_size * first / (ops.sqrt(second) * root + self.settings.epsilon))

    def _momentum(self, index: int, parameter: Parameter, gradient: Tensor, rate: Tensor, is_first: Tensor) -> None:
        if self.settings.momentum:
            gradient = self.first[index] * self.settings.momentum * (1.0 - is_first) + gradient
            self.assign(self.first[index], gradient)
        self.assign(parameter, parameter - rate * gradient)


def build_optimizer(tensors: Mapping[str, Parameter], config: OptimizerConfig) -> Optimizer:
    return Optimizer(tensors, config)


def _zeros(tensors: Mapping[str, Parameter], part: str) -> dict[str, Parameter]:
    return {name: Parameter(ops.zeros_like(tensor), name=f"{name}.{part}", requires_grad=False) for name, tensor in tensors.items()}


@ms.jit
def global_norm(*gradients: Tensor) -> Tensor:
    """Euclidean norm over all gradients together, float32 scalar."""
    total = Tensor(0.0, ms.float32)
    for gradient in gradients:
        total = total + ops.ReduceSum()(ops.square(gradient))
    return ops.sqrt(total)


@ms.jit
def add_gradients(*both: Tensor) -> tuple[Tensor, ...]:
    """(n sums, n gradients) -> n sums."""
    count = len(both) // 2
    summed: tuple[Tensor, ...] = ()
    for index in range(count):
        summed = (*summed, both[index] + both[count + index])
    return summed

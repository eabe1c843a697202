"""A step of the optimizer that the device takes or skips, without asking the host."""

from __future__ import annotations

import math
from typing import Any, assert_never

import torch
from torch import Tensor

from common.config.schema import OptimizerConfig
from torch_gpt2.optimizer import local_shard
from torch_gpt2.private_api import foreach_adam, foreach_momentum, foreach_multiply, fused_adam


def takes_adam_kernel(config: OptimizerConfig) -> bool:
    """Tell whether ``TorchDevice.adam_kernel`` computes the rule."""
    match config.name:
        case "adamw" | "adam":
            return True
        case "sgd":
            return False
        case _:
            assert_never(config.name)


class DeviceStep:
    """Steps of an optimizer that ``build_optimizer`` made, whose state it reads and writes.

    torch's fused Adam can be skipped by the device. For the others this class computes the same sums, and a skipped
    step multiplies every change by 0. Adam's kernel of an Ascend cannot be skipped by the device, so the host asks once
    a step. It moves 36 bytes a parameter instead of 112.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, adam_kernel: bool) -> None:
        """Create. adam_kernel: use ``TorchDevice.adam_kernel``."""
        self._optimizer: Any = optimizer
        self._config = config
        self._adam_kernel = adam_kernel
        self._updates: Tensor | None = None
        """Updates made, float32 scalar on the device; the state of every parameter shares it."""
        self._known_updates = 0
        """Number of updates made that the host knows, for Adam's kernel."""

    @torch.no_grad()
    def __call__(self, applied: Tensor, factor: Tensor) -> None:
        """Update with the gradients times ``factor`` if ``applied``, both scalars of the device.

        Otherwise weights, moments and the number of updates stay as they are. The gradients are overwritten.
        """
        optimizer = self._optimizer
        if optimizer.defaults.get("fused"):
            optimizer.grad_scale = factor.reciprocal().float()
            optimizer.found_inf = (~applied).float()
            optimizer.step()
            return
        known: Tensor | float = factor.float()
        if self._adam_kernel:
            known = factor.masked_fill(~applied, math.nan).item()  # waits for the device
            if math.isnan(known):
                return
        if self._config.rule.counts_updates:
            self._count(applied)
        for group in optimizer.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if parameters:
                self._update(group, parameters, applied, known)

    def _count(self, applied: Tensor) -> None:
        states = self._optimizer.state.values()
        held: Tensor | None = next((state["step"] for state in states if "step" in state), None)
        updates = self._updates
        if updates is None or held is not updates:  # a checkpoint has been loaded
            updates = torch.zeros_like(applied, dtype=torch.float32)
            if held is not None:
                updates.copy_(held)
            if self._adam_kernel:
                self._known_updates = 0 if held is None else int(held.item())
        self._updates = updates.add_(applied)
        self._known_updates += 1

    def _update(self, group: dict[str, Any], parameters: list[Tensor], applied: Tensor, factor: Tensor | float) -> None:
        config, rate = self._config, float(group["lr"])
        weights = [local_shard(each.detach()) for each in parameters]
        gradients = [local_shard(each.grad) for each in parameters if each.grad is not None]
        foreach_multiply(gradients, factor)
        decay = group["weight_decay"]
        if decay and not config.rule.decouples_decay:
            for weight, gradient in zip(weights, gradients, strict=True):
                gradient.add_(weight, alpha=decay)
        if not self._adam_kernel:
            skipped = ~applied
            for gradient in gradients:
                gradient.masked_fill_(skipped, 0.0)  # 0 times what is not finite would not be 0
        moments = []
        for name in config.state_parts:  # zeros at first
            for parameter in parameters:
                state = self._optimizer.state[parameter]
                if state.get(name) is None:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                if self._updates is not None:
                    state["step"] = self._updates
            moments.append([local_shard(self._optimizer.state[each][name]) for each in parameters])
        match config.name:
            case "sgd":
                [buffers] = moments or [gradients]
                kept = torch.where(applied, config.momentum, 1.0)
                foreach_momentum(weights, gradients, buffers, kept, applied.float(), rate)
            case "adamw" | "adam":
                decay = decay if config.rule.decouples_decay else 0.0
                self._adam([weights, gradients, *moments], applied, rate, decay)
            case _:
                assert_never(config.name)

    def _adam(self, lists: list[list[Tensor]], applied: Tensor, rate: float, decay: float) -> None:
        """Take a step of Adam. lists: weights, gradients, first and second moments."""
        config = self._config
        assert self._updates is not None
        betas, epsilon = (config.beta1, config.beta2), config.epsilon
        if self._adam_kernel:
            fused_adam(*lists, updates=self._known_updates, betas=betas, epsilon=epsilon, rate=rate, decay=decay)
            return
        count = self._updates.clamp(min=1.0)
        # 1 - beta^count, which float32 does not hold near 1
        first_part, second_part = (-torch.expm1(count * (math.log(beta) if beta else -math.inf)) for beta in betas)
        made = applied.float()
        foreach_adam(
            *lists,
            betas=betas,
            kept=tuple(torch.where(applied, beta, 1.0) for beta in betas),
            epsilon=epsilon,
            root=second_part.sqrt(),
            rate=rate * made / first_part,
            decay=1.0 - rate * decay * made if decay else None,
        )

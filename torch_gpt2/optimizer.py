"""Optimizers over named parameters: decay and no-decay groups, float32 copies of low-precision weights, gradients and
their norm, and a step that the device takes or skips, without asking the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, assert_never

import torch
from torch import Tensor, nn

from common.config.schema import LossScaleConfig, OptimizerConfig
from common.parallel.updates import LossScale
from common.weights.names import decays
from torch_gpt2.device import wide_type
from torch_gpt2.private_api import (
    foreach_adam,
    foreach_copy,
    foreach_momentum,
    foreach_multiply,
    foreach_norm,
    fused_adam,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class DeviceLossScale:
    """``common.parallel.updates.LossScale`` on the device, which updates it without the host.
    ``value`` is a scalar of ``wide_type``.
    """

    value: Tensor
    finite_steps: Tensor
    overflows: Tensor

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self.config = config
        self._device = device
        self.write(LossScale(config))

    def update(self, finite: Tensor) -> None:
        """Grow or shrink after a step whose gradients were finite, or not."""
        config = self.config
        if config.mode != "dynamic":
            return
        steps = (self.finite_steps + 1) * finite
        grow = steps == config.window
        overflows = (self.overflows + ~finite).clamp(max=config.hysteresis)
        shrink = ~finite & (overflows == config.hysteresis)
        smaller = (self.value / config.factor).clamp(min=config.minimum)
        self.value = torch.where(grow, self.value * config.factor, torch.where(shrink, smaller, self.value))
        self.finite_steps, self.overflows = steps * ~grow, overflows * ~grow

    def write(self, state: LossScale) -> None:
        def number(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((), value, dtype=dtype, device=self._device)

        self.value = number(state.value, wide_type(self._device))
        self.finite_steps = number(state.finite_steps, torch.int32)
        self.overflows = number(state.overflows, torch.int32)


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
                parameter.grad_dtype = torch.float32  # autograd would round each sum

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients of the float32 tensors by name, this rank's part of them, once all micro batches are done."""
        for name, tensor in self.tensors.items():
            parameter = self.model[name]
            if tensor is not parameter and parameter.grad is not None:
                tensor.grad, parameter.grad = parameter.grad.float(), None
        return {name: local_shard(tensor.grad) for name, tensor in self.tensors.items() if tensor.grad is not None}

    def write_back(self) -> None:
        """Round the float32 tensors into the model."""
        copied = [name for name, tensor in self.tensors.items() if tensor is not self.model[name]]
        if copied:
            with torch.no_grad():
                foreach_copy(
                    [local_shard(self.model[name].detach()) for name in copied],
                    [local_shard(self.tensors[name].detach()) for name in copied],
                )


def _is_split(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether ZeRO has split a tensor. Importing its class takes half a second."""
    return hasattr(tensor, "to_local")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that ZeRO has split, in the same memory, and any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if _is_split(tensor) else tensor


def parameter_groups(
    tensors: Mapping[str, Tensor], config: OptimizerConfig, frozen: Collection[str] = ()
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
            if (decays(name) and name not in frozen) is decay and _is_split(tensor) is split
        ]
        if members:
            groups.append({"params": members, "weight_decay": config.weight_decay if decay else 0.0})
    return groups


def build_optimizer(
    tensors: Mapping[str, Tensor], config: OptimizerConfig, *, fused: bool, frozen: Collection[str] = ()
) -> torch.optim.Optimizer:
    """torch's own optimizer over ``parameter_groups``."""
    groups = parameter_groups(tensors, config, frozen)
    match config.name:
        case "sgd":
            return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
        case "adamw" | "adam":
            kind = torch.optim.AdamW if config.rule.decouples_decay else torch.optim.Adam
            return kind(
                groups,
                lr=config.learning_rate,
                betas=(config.beta1, config.beta2),
                eps=config.epsilon,
                fused=fused or None,  # False would also keep torch from choosing foreach
            )
        case _:
            assert_never(config.name)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, what several of them share counted once."""
    storages = [local_shard(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm over all gradients together, float32 scalar."""
    on_cpu = gradients[0].device.type == "cpu"
    norms = [_norm_by_rows(gradient) for gradient in gradients] if on_cpu else foreach_norm(gradients)
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


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """``common.parallel.updates.clip_factor`` on the device."""
    if not limit:
        return torch.ones_like(norm)
    # a number over a tensor would be the tensor's reciprocal times the number
    return (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0)


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

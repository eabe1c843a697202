"""Optimizers over named parameters, equal to torch's. Float32 copies of low-precision weights, gradients as Cells to
compile, their norm, and the loss scale.

MindSpore's own optimizers do not serve: nn.AdamWeightDecay has no bias correction, and
mint.optim.AdamW has no CPU kernel.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, assert_never

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from common.config.schema import LossScaleConfig, OptimizerConfig
from common.parallel.run import Run
from common.parallel.updates import LossScale
from common.weights.names import decays
from mindformers_gpt2.device import DTYPES
from mindformers_gpt2.model import GPT2
from mindformers_gpt2.parallel.data_parallel import DataParallel


class MasterWeights:
    """The float32 tensors that the optimizer updates: the parameters themselves, copies of those
    held in fewer bits, or this rank's share. Fill ``tensors`` and then ``write_back``: the copies
    hold more than the model's rounded weights do. shares: the split of ZeRO.
    """

    def __init__(self, parameters: Mapping[str, Parameter], shares: DataParallel | None = None) -> None:
        self.model = dict(parameters)
        self.shares = shares
        self.tensors = {
            name: parameter
            if shares is None and parameter.dtype == ms.float32
            else self.zeros_like(parameter, f"{name}.master", shares.share_of(parameter.shape) if shares else None)
            for name, parameter in parameters.items()
        }

    def zeros_like(self, tensor: Parameter, name: str, shape: tuple[int, ...] | None = None) -> Parameter:
        """A place for float32 state of a parameter, of its shape or of another."""
        return Parameter(ops.zeros(shape or tensor.shape, ms.float32), name=name, requires_grad=False)

    def write_back(self) -> None:
        """Round the float32 tensors into the model."""
        values: Sequence[Tensor] = list(self.tensors.values())
        if self.shares is not None:
            values = self.shares.whole(ms.ParameterTuple(values), ms.ParameterTuple(self.model.values()))
        for value, target in zip(values, self.model.values(), strict=True):
            if value is not target:
                ops.assign(target, ops.cast(value, target.dtype))


class DeviceLossScale(nn.Cell):
    """``common.parallel.updates.LossScale`` on the device, where the graph moves it without asking the host."""

    def __init__(self, config: LossScaleConfig) -> None:
        super().__init__(auto_prefix=False)
        self.config = config
        self.value = _number("loss_scale.value", np.float32(0))
        self.finite_steps = _number("loss_scale.finite_steps", np.int32(0))
        self.overflows = _number("loss_scale.overflows", np.int32(0))
        self.write(LossScale(config))

    def construct(self, finite: Tensor) -> None:
        """Grow or shrink after a step whose gradients were finite, or not."""
        if self.config.mode != "dynamic":
            return
        if finite:
            steps = self.finite_steps + 1
            grow = steps == self.config.window
            ops.assign(self.value, ops.select(grow, self.value * self.config.factor, self.value * 1.0))
            ops.assign(self.overflows, ops.select(grow, ops.zeros_like(steps), self.overflows + 0))
            ops.assign(self.finite_steps, ops.select(grow, ops.zeros_like(steps), steps))
        else:
            most = Tensor(self.config.hysteresis, ms.int32)
            overflows = ops.minimum(self.overflows + 1, most)
            shrink = overflows == most
            smaller = ops.maximum(self.value / self.config.factor, Tensor(self.config.minimum, ms.float32))
            ops.assign(self.value, ops.select(shrink, smaller, self.value * 1.0))
            ops.assign(self.overflows, overflows)
            ops.assign(self.finite_steps, ops.zeros_like(overflows))

    def read(self) -> LossScale:
        state = LossScale(self.config)
        state.value = float(self.value.asnumpy())
        state.finite_steps = int(self.finite_steps.asnumpy())
        state.overflows = int(self.overflows.asnumpy())
        return state

    def write(self, state: LossScale) -> None:
        ops.assign(self.value, Tensor(state.value, ms.float32))
        ops.assign(self.finite_steps, Tensor(state.finite_steps, ms.int32))
        ops.assign(self.overflows, Tensor(state.overflows, ms.int32))


def varies(config: Run) -> bool:
    """Whether the steps of a run differ in the number of tokens whose losses count."""
    masks = config.packing is not None and bool(config.packing.masks_loss)
    return masks or config.train.rampup_batch_size is not None


class _Gradients(nn.Cell):
    def __init__(self, model: GPT2, config: Run) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.sum_dtype = DTYPES[config.precision.reduction]
        self.casts = config.precision.parameters not in ("float32", config.precision.reduction)
        self.parameters = ms.ParameterTuple(tuple(model.trainable_params()))

    def cast(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cast gradients of weights below float32 to the type in which they are summed."""
        return ops.HyperMap()(ops.partial(_to, self.sum_dtype), gradients) if self.casts else gradients


class LossGradients(_Gradients):
    """Map (ids, targets, dropout keys) of a micro batch to its part of the mean loss and the gradients.

    The gradients are multiplied by the loss scale. ``of_input``: on the last stage of a pipeline it takes hidden states
    (B, T, C), and the ids as tokens if documents are kept apart, and returns the gradient of its input before the
    others.
    """

    def __init__(self, model: GPT2, config: Run, loss_scale: DeviceLossScale, *, of_input: bool = False) -> None:
        super().__init__(model, config)
        self.predicted: Any = config.train.global_batch_size * config.model.seq_length
        if varies(config):
            # the engine sets it in each step
            whole = Tensor(self.predicted, ms.float32)
            self.predicted = ms.Parameter(whole, name="predicted", requires_grad=False)
        self.scale = loss_scale.value
        self.of_input = of_input
        self.value_and_grad = ms.value_and_grad(
            self.scaled_loss, 0 if of_input else None, self.parameters, has_aux=True
        )

    def construct(self, ids: Tensor, targets: Tensor, keys: Tensor = None, tokens: Tensor = None) -> tuple[Tensor, ...]:
        (_, loss), gradients = self.value_and_grad(ids, targets, keys, tokens)
        if self.of_input:
            return (loss / self.predicted, gradients[0], *self.cast(gradients[1]))
        return (loss / self.predicted, *self.cast(gradients))

    def scaled_loss(
        self, ids: Tensor, targets: Tensor, keys: Tensor = None, tokens: Tensor = None
    ) -> tuple[Tensor, Tensor]:
        loss = self.model.loss_sum(ids, targets, keys, tokens)
        return loss * (self.scale / self.predicted), loss


class StageGradients(_Gradients):
    """Map (input, gradient of the output, dropout keys) of a stage to gradients of its weights.

    The gradient of the input comes first, unless the input is ids. The forward pass is repeated,
    since only its input is kept.
    """

    def __init__(self, model: GPT2, config: Run, *, of_input: bool) -> None:
        super().__init__(model, config)
        self.of_input = of_input
        self.gradient = ms.grad(self.along_slope, 0 if of_input else None, self.parameters)

    def construct(self, x: Tensor, slope: Tensor, keys: Tensor = None, tokens: Tensor = None) -> tuple[Tensor, ...]:
        gradients = self.gradient(x, slope, keys, tokens)
        if self.of_input:
            return (gradients[0], *self.cast(gradients[1]))
        return self.cast(gradients)

    def along_slope(self, x: Tensor, slope: Tensor, keys: Tensor = None, tokens: Tensor = None) -> Tensor:
        """Return a number whose gradients are those of x, given the gradient ``slope`` of the output."""
        return ops.ReduceSum()(self.model(x, keys, tokens) * slope)


def _to(dtype: ms.Type, gradient: Tensor) -> Tensor:
    return ops.cast(gradient, dtype)


class Optimizer(nn.Cell):
    """One step of all parameters as one graph: norm, clip, update or skip, loss scale.

    The host is not asked. ``state[part][name]`` holds the moments. ``steps`` counts the updates,
    without skipped ones. ``rates`` holds the learning rates of the next updates, and ``place`` the
    one to take. gradient_sync: where there are several ranks, takes this one's loss and gradients,
    and returns the loss and the norm of all, and the gradients to update with.
    """

    def __init__(
        self,
        master: MasterWeights,
        config: OptimizerConfig,
        loss_scale: DeviceLossScale,
        gradient_sync: nn.Cell | None = None,
        frozen: Collection[str] = (),
        rates: int = 1,
    ) -> None:
        """Create an optimizer. rates: number of updates whose learning rates the graph holds."""
        super().__init__(auto_prefix=False)
        self.settings = config
        self.gradient_sync = gradient_sync
        self.shares = master.shares
        self.loss_scale = loss_scale
        self.scales = loss_scale.config.mode in ("dynamic", "static")
        tensors = master.tensors
        self.steps = _number("optimizer.steps", np.int32(0))
        self.rates = _number("optimizer.rates", np.zeros(rates, np.float32))
        self.place = _number("optimizer.place", np.int32(0))
        self.parameters = ms.ParameterTuple(tuple(tensors.values()))
        self.rounded = ms.ParameterTuple(tuple(master.model.values()))
        self.has_copy = tuple(tensor is not master.model[name] for name, tensor in tensors.items())
        self.decays = tuple(config.weight_decay > 0.0 and decays(name) and name not in frozen for name in tensors)
        parts = config.state_parts
        self.state = {
            part: {name: master.zeros_like(tensor, f"{name}.{part}") for name, tensor in tensors.items()}
            for part in parts
        }
        self.first = ms.ParameterTuple(tuple(self.state[parts[0]].values())) if parts else ()
        self.second = ms.ParameterTuple(tuple(self.state[parts[1]].values())) if len(parts) > 1 else ()
        numbers = (0.0, config.beta1, config.beta2, config.momentum)
        self.no_power, self.beta1, self.beta2, self.momentum = (Tensor(number, ms.float32) for number in numbers)
        # the logarithm of 0 stands for a power that vanishes at once
        self.log_betas = tuple(math.log(beta) if beta else -1e30 for beta in (config.beta1, config.beta2))
        self.cast, self.multiply = ops.Cast(), ops.Mul()
        self.adam = ops.Adam()
        self.decouples_decay = config.rule.decouples_decay
        match config.name:
            case "adamw" | "adam":
                self.kernel = "Adam"
            case "sgd":
                self.kernel = "ApplyMomentum" if config.momentum else "ApplyGradientDescent"
            case _:
                assert_never(config.name)
        self.descend_with_momentum = ops.ApplyMomentum()
        self.descend = ops.ApplyGradientDescent()  # parameter -= rate x gradient, in place

    @property
    def kernels(self) -> list[str]:
        """Names of the operators that update a parameter, for the log."""
        decoupled = self.decouples_decay and any(self.decays)
        return [self.kernel, "ApplyGradientDescent"] if decoupled else [self.kernel]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set the learning rates of the next updates; skipped steps use up none."""
        ops.assign(self.rates, Tensor(rates, ms.float32))
        ops.assign(self.place, Tensor(0, ms.int32))

    def construct(self, limits: Tensor, loss: Tensor, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Update with the gradients of the loss times the loss scale, unless one of them or the
        loss is not finite, or beyond a limit.

        limits: (2,), the largest loss and gradient norm; to exceed them does not count as an
        overflow, so the loss scale moves as in any other step. Returns the loss, the norm with the
        scale taken out, whether there was an update, and the scale that the gradients came with.
        The gradients come one by one: a tuple would be a constant, and every step a new graph.
        """
        scale = self.loss_scale.value * 1.0
        if self.gradient_sync is not None:
            loss, norm, gradients = self.gradient_sync(loss, gradients)
        else:
            norm = global_norm(*gradients)
        norm = norm / scale
        finite = ops.logical_and(ops.isfinite(norm), ops.isfinite(loss))
        applied = ops.logical_and(finite, ops.logical_and(loss <= limits[0], norm <= limits[1]))
        if applied:
            factor = 1.0 / scale
            if self.settings.clip_grad:
                # what common.parallel.updates.clip_factor says
                factor = factor * ops.minimum(self.settings.clip_grad / (norm + 1e-6), Tensor(1.0, ms.float32))
            rate = ops.gather(self.rates, self.place, 0)
            self._update(rate, factor, gradients)
            ops.assign(self.place, self.place + 1)
        self.loss_scale(finite)
        return loss, norm, applied, scale

    def _update(self, rate: Tensor, factor: Tensor, gradients: tuple[Tensor, ...]) -> None:
        config = self.settings
        steps = ops.cast(self.steps + 1, ms.float32)
        ops.assign(self.steps, self.steps + 1)
        # Adam's bias corrections; 1 - beta^steps in float32 would lose its digits in the first steps
        first = -ops.expm1(steps * self.log_betas[0])
        root = ops.sqrt(-ops.expm1(steps * self.log_betas[1]))
        # The kernel corrects by powers of beta, which are zero here, and adds epsilon to the uncorrected root.
        step_size, epsilon, decayed = (rate * root / first, config.epsilon * root, rate * config.weight_decay)
        # HyperMap instead of a loop: each round of a loop is a graph of its own to the compiler
        ops.HyperMap()(
            ops.partial(self._update_one, rate, factor, step_size, epsilon, decayed),
            gradients,
            self.parameters,
            self.first or self.parameters,
            self.second or self.parameters,
            self.rounded,
            self.decays,
            self.has_copy,
        )
        if self.shares is not None:
            for index, whole in enumerate(self.shares.whole(self.parameters, self.rounded)):
                ops.assign(self.rounded[index], ops.cast(whole, self.rounded[index].dtype))

    def _update_one(
        self,
        rate: Tensor,
        factor: Tensor,
        step_size: Tensor,
        epsilon: Tensor,
        decayed: Tensor,
        gradient: Tensor,
        parameter: Parameter,
        first: Parameter,
        second: Parameter,
        rounded: Parameter,
        decays: bool,
        has_copy: bool,
    ) -> bool:
        """Update a parameter, its moments and its copy in the model. Return True, since HyperMap needs a result."""
        config = self.settings
        gradient = self.cast(gradient, ms.float32)
        if self.scales or config.clip_grad:
            gradient = self.multiply(gradient, factor)
        if decays and self.decouples_decay:
            self.descend(parameter, decayed, parameter)
        elif decays:
            gradient = gradient + config.weight_decay * parameter
        if self.kernel == "Adam":
            zero, betas = self.no_power, (self.beta1, self.beta2)
            self.adam(parameter, first, second, zero, zero, step_size, *betas, epsilon, gradient)
        elif self.kernel == "ApplyMomentum":
            self.descend_with_momentum(parameter, first, rate, gradient, self.momentum)
        else:
            self.descend(parameter, rate, gradient)
        if has_copy and self.shares is None:
            ops.assign(rounded, self.cast(parameter, rounded.dtype))
        return True


def global_norm(*gradients: Tensor) -> Tensor:
    """Euclidean norm over all gradients together, float32 scalar."""
    return ops.sqrt(ops.AddN()(ops.HyperMap()(squares, gradients)))


def squares(gradient: Tensor) -> Tensor:
    """The sum of the squares of its elements, float32 scalar."""
    # summed along the last axis first: over all axes at once the CPU's kernel takes eight times as long
    return _sum(_sum(_square(_cast(gradient, ms.float32)), -1))


_cast, _square, _sum = ops.Cast(), ops.Square(), ops.ReduceSum()


def add_gradients(*both: Tensor) -> tuple[Tensor, ...]:
    """(n sums, n gradients) -> n sums."""
    count = len(both) // 2
    summed: tuple[Tensor, ...] = ops.HyperMap()(ops.Add(), both[:count], both[count:])
    return summed


def _number(name: str, value: Any) -> Parameter:
    return Parameter(Tensor(value), name=name, requires_grad=False)

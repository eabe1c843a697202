"""Fake quantization of linear layers, by the rules of ``common.quantization``."""

from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from common.config.schema import QuantizationConfig
from common.parallel.run import Run
from common.quantization import Levels, activation_levels, weight_levels
from common.training.engine import QuantizedModel
from mindformers_gpt2.model import GPT2, Linear
from mindformers_gpt2.parallel.collectives import AllGather, Group
from mindformers_gpt2.parallel.world import World


class FakeQuantize(nn.Cell):
    """Round x to multiples of ``scale`` within the levels, in the type of x.

    The gradient passes unchanged where x was not clipped, and is 0 elsewhere.
    """

    def __init__(self, levels: Levels) -> None:
        super().__init__()
        self.low, self.high = float(levels.low), float(levels.high)
        self.round = ops.Round()

    def construct(self, x: Tensor, scale: Tensor) -> Tensor:
        steps = ops.clamp(self.steps(x, scale), self.low, self.high)
        return ops.cast(steps * scale, x.dtype)

    def steps(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.round(ops.cast(x, ms.float32) * (1.0 / scale))

    def bprop(self, x: Tensor, scale: Tensor, out: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        steps = self.steps(x, scale)
        inside = ops.logical_and(steps >= self.low, steps <= self.high)
        return slope * ops.cast(inside, slope.dtype), ops.zeros_like(scale)


class _GroupMaximum(nn.Cell):
    """Maximum over the ranks of a group."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.gather = AllGather(group)

    def construct(self, x: Tensor) -> Tensor:
        return ops.ReduceMax()(self.gather(ops.expand_dims(x, 0)), 0)


class LinearQuantizer(nn.Cell):
    """Quantizer of the input of a linear layer and of its weight, of which a rank may hold a part."""

    def __init__(
        self, config: QuantizationConfig, weight_group: Group | None = None, input_group: Group | None = None
    ) -> None:
        """Create a quantizer. weight_group, input_group: the ranks whose parts share a scale."""
        super().__init__()
        self.kind = config.activations
        self.weight_axes = 1 if config.weights == "channel_wise_abs_max" else (0, 1)
        self.input_axes = -1 if config.activations == "dynamic" else ()
        self.round_weight = FakeQuantize(weight_levels(config.weight_bits))
        self.round_input = FakeQuantize(activation_levels(config.activation_bits))
        self.weight_high = Tensor(weight_levels(config.weight_bits).high, ms.float32)
        self.input_high = Tensor(activation_levels(config.activation_bits).high, ms.float32)
        self.of_weight = _GroupMaximum(weight_group) if weight_group is not None else None
        self.of_input = _GroupMaximum(input_group) if input_group is not None else None
        self.scale = _state("scale")
        """Scale of the input from earlier steps. While it is 0 the input is not rounded."""
        self.maximum = _state("maximum")
        """Largest absolute input of this step."""

    def forget(self) -> None:
        ops.assign(self.maximum, Tensor(0.0, ms.float32))

    def set_scale(self, scale: float) -> None:
        ops.assign(self.scale, Tensor(scale, ms.float32))

    def weight(self, weight: Tensor) -> Tensor:
        """Return the weight (out, in), rounded."""
        fixed = ops.stop_gradient(ops.cast(weight, ms.float32))
        maximum = ops.ReduceMax(keep_dims=True)(ops.abs(fixed), self.weight_axes)
        if self.of_weight is not None:
            maximum = self.of_weight(maximum)
        return self.round_weight(weight, _scale(maximum, self.weight_high))

    def input(self, x: Tensor) -> Tensor:
        """Return the input (..., in), rounded."""
        if self.kind == "none":
            return x
        magnitude = ops.abs(ops.stop_gradient(ops.cast(x, ms.float32)))
        if self.kind == "moving_average_abs_max":
            self.maximum = ops.maximum(self.maximum, ops.ReduceMax()(magnitude))
            is_known = self.scale > 0
            scale = ops.select(is_known, self.scale, ops.ones_like(self.scale))
            return ops.where(is_known, self.round_input(x, scale), x)
        maximum = ops.ReduceMax(keep_dims=True)(magnitude, self.input_axes)
        if self.of_input is not None:
            maximum = self.of_input(maximum)
        return self.round_input(x, _scale(maximum, self.input_high))


def _state(name: str) -> Parameter:
    return Parameter(Tensor(0.0, ms.float32), name=name, requires_grad=False)


def _scale(maximum: Tensor, high: Tensor) -> Tensor:
    scale = maximum / high
    return ops.stop_gradient(ops.where(scale == 0, ops.ones_like(scale), scale))


def forget_maxima(model: GPT2) -> None:
    """Forget the maxima of all layers, as after a pass on meaningless values."""
    for _, cell in model.cells_and_names():
        if isinstance(cell, LinearQuantizer):
            cell.forget()


class Quantization(QuantizedModel):
    def __init__(self, config: Run, model: GPT2, world: World) -> None:
        linears = [cell for _, cell in model.cells_and_names() if isinstance(cell, Linear)]
        # the name in the whole model, of which this may be a stage
        named = [(cell.weight.name.removesuffix(".weight"), cell) for cell in linears]
        super().__init__(config, world, named, lambda settings, _, *of: LinearQuantizer(settings, *of))
        for name, quantizer in self.quantizers.items():
            for parameter in quantizer.get_parameters():  # the assignment renames it
                parameter.name = f"{name}.{parameter.name}"

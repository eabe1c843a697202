"""Linear layers that round: fake quantization, by the rules of ``common.quantization``, and float8, by torchao's
training with dynamic scales.

A product in float8 takes its inputs divided by their largest value: of the tensor (tensorwise) or of each row
(rowwise). Weights keep their names and types, and so do checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.config.schema import QuantizationConfig
from common.parallel.run import Run
from common.quantization import Levels, activation_levels, weight_levels
from common.training.engine import QuantizedModel
from torch_gpt2.model import GPT2, Linear
from torch_gpt2.parallel.world import World


class FakeQuantize(torch.autograd.Function):
    """Round x to multiples of ``scale`` within the levels, in the type of x.

    The gradient passes unchanged where x was not clipped, and is 0 elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, levels: Levels) -> Tensor:
        steps = (x.float() * scale.reciprocal()).round()
        ctx.save_for_backward((steps >= levels.low) & (steps <= levels.high))
        out = (steps.clamp(*levels) * scale).to(x.dtype)
        return out.view_as(out)  # a new tensor, or torch 2.11's compiler loses its gradient

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None


class LinearQuantizer:
    """Quantizer of the input of a linear layer and of its weight, of which a rank may hold a part."""

    def __init__(
        self,
        config: QuantizationConfig,
        device: torch.device,
        weight_group: dist.ProcessGroup | None = None,
        input_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create a quantizer. weight_group, input_group: the ranks whose parts share a scale."""
        self._config = config
        self._weight_levels = weight_levels(config.weight_bits)
        self._input_levels = activation_levels(config.activation_bits)
        self._weight_axes = (1,) if config.weights == "channel_wise_abs_max" else (0, 1)
        self._weight_group, self._input_group = weight_group, input_group
        self._averages = config.activations == "moving_average_abs_max"
        self.scale = torch.zeros((), device=device)
        """Scale of the input from earlier steps. While it is 0 the input is not rounded."""
        self.maximum = torch.zeros((), device=device)
        """Largest absolute input of this step."""

    def forget(self) -> None:
        self.maximum.zero_()

    def set_scale(self, scale: float) -> None:
        self.scale.fill_(scale)

    def weight(self, weight: Tensor) -> Tensor:
        """Return the weight (out, in), rounded."""
        maximum = weight.detach().float().abs().amax(self._weight_axes, keepdim=True)
        return _rounded(weight, _everywhere(maximum, self._weight_group), self._weight_levels)

    def input(self, x: Tensor) -> Tensor:
        """Return the input (..., in), rounded."""
        kind = self._config.activations
        if kind == "none":
            return x
        if self._averages:
            with torch.no_grad():
                self.maximum.copy_(torch.maximum(self.maximum, x.detach().abs().amax().float()))
            is_known = self.scale > 0
            scale = torch.where(is_known, self.scale, 1.0)
            rounded: Tensor = FakeQuantize.apply(x, scale, self._input_levels)  # type: ignore[no-untyped-call]
            return torch.where(is_known, rounded, x)
        axes = (-1,) if kind == "dynamic" else tuple(range(x.dim()))
        maximum = x.detach().float().abs().amax(axes, keepdim=True)
        return _rounded(x, _everywhere(maximum, self._input_group), self._input_levels)


def _rounded(x: Tensor, maximum: Tensor, levels: Levels) -> Tensor:
    # a kernel, not a copy from the host
    scale = maximum / torch.full((), levels.high, dtype=torch.float32, device=x.device)
    scale = torch.where(scale == 0, 1.0, scale)
    result: Tensor = FakeQuantize.apply(x, scale, levels)  # type: ignore[no-untyped-call]
    return result


def _everywhere(maximum: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the maximum over the ranks of a group."""
    if group is not None:
        maximum = maximum.contiguous()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return maximum


def forget_maxima(model: nn.Module) -> None:
    """Forget the maxima of all layers, as after a pass on meaningless values."""
    for module in model.modules():
        if isinstance(module, Linear) and module.quantizer is not None:
            module.quantizer.forget()


class Quantization(QuantizedModel):
    def __init__(self, config: Run, parts: Sequence[GPT2], world: World) -> None:
        modules = (each for part in parts for each in part.named_modules())
        linears = (each for each in modules if isinstance(each[1], Linear))
        super().__init__(
            config, world, linears, lambda settings, layer, *of: LinearQuantizer(settings, layer.weight.device, *of)
        )


EMULATED_FLOAT8 = False
"""Compute with the numbers of float8 and kernels of float32, for tests without a GPU."""


def convert_linear_layers(model: GPT2, config: Run) -> None:
    """Replace the linear layers of a part of the model, if the run asks for float8.

    The head is not a linear layer: it is the token table, in the type of the computation.
    """
    if config.precision.float8 == "none":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(config.precision.float8)
    recipe = replace(recipe, emulate=EMULATED_FLOAT8)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda module, _: isinstance(module, Linear))

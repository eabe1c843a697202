"""Gradients of the model, or of one stage of a pipeline, as Cells to compile."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from common.parallel.run import Run
from mindformers_gpt2.device import DTYPES
from mindformers_gpt2.model import GPT2
from mindformers_gpt2.optimizer import DeviceLossScale


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
        return ops.HyperMap()(ops.partial(_cast, self.sum_dtype), gradients) if self.casts else gradients


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


def _cast(dtype: ms.Type, gradient: Tensor) -> Tensor:
    return ops.cast(gradient, dtype)

"""One device: forward, backward, accumulate, clip, step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from common.config.schema import RunConfig
from common.dataset import Batch
from common.training.checkpoint import Snapshot
from common.training.loop import StepResult, Tokens
from common.training.outliers import NO_LIMITS, Limits
from common.training.schedule import learning_rate
from common.training.state import TrainState
from mindformers_gpt2.checkpoint import take_snapshot
from mindformers_gpt2.data import inputs_and_targets
from mindformers_gpt2.device import DTYPES, MindSporeDevice
from mindformers_gpt2.model import GPT2, dropout_keys
from mindformers_gpt2.optimizer import DeviceLossScale, MasterWeights, add_gradients, build_optimizer


class Engine:
    """Implements ``common.training.loop.Engine`` for one device. The config must be resolved.

    A step is two graphs, gradients of a micro batch and update, which wait for nothing on the host: ``run`` starts all its steps
    before it reads the first result.
    """

    def __init__(self, model: GPT2, config: RunConfig, device: MindSporeDevice, record: Mapping[str, Any] | None = None) -> None:
        """``record``: plain data kept in every checkpoint's manifest."""
        self.model = model
        self.config = config
        self.device = device
        self.record = dict(record or {})
        self.step = 0
        self.steps_per_run = config.train.sink_size
        self.loss_scale = DeviceLossScale(config.loss_scale)
        self.master = MasterWeights({parameter.name: parameter for parameter in model.get_parameters()})
        self.optimizer = build_optimizer(self.master, config.optimizer, self.loss_scale)
        self._drops = any((config.model.embedding_dropout, config.model.attention_dropout, config.model.hidden_dropout))
        self._loss_sum = device.compile(model.loss_sum)
        self._gradients = device.compile(_Gradients(self.model, config, self.loss_scale))
        self._add = device.compile(add_gradients)
        self._update = device.compile(self.optimizer)

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        bounds = Tensor((limits.loss, limits.grad_norm), ms.float32)
        queued = [self._train_step(next(batches).tokens, bounds) for _ in range(steps)]
        return [step.read() for step in queued]

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        total, tokens = 0.0, 0
        for batch in batches:
            ids, targets = inputs_and_targets(batch)
            total += float(self._loss_sum(ids, targets).asnumpy())
            tokens += targets.size
        return total, tokens

    def snapshot(self, state: TrainState) -> Snapshot:
        return take_snapshot(self, state)

    def _train_step(self, tokens: NDArray[np.int32], limits: Tensor) -> _QueuedStep:
        self.step += 1
        rate = learning_rate(self.config.optimizer, self.step)
        loss, *gradients = self._accumulate_gradients(tokens)
        norm, applied, scale = self._update(Tensor(rate, ms.float32), limits, loss, *gradients)
        return _QueuedStep(loss=loss, norm=norm, applied=applied, scale=scale, rate=rate)

    def _accumulate_gradients(self, tokens: NDArray[np.int32]) -> tuple[Tensor, ...]:
        """Mean loss of the batch, and its gradients times the loss scale."""
        micro = self.config.train.micro_batch_size
        assert micro is not None
        summed: tuple[Tensor, ...] | None = None
        for number, start in enumerate(range(0, tokens.shape[0], micro)):
            keys = (Tensor(dropout_keys(self.config, self.step, number)),) if self._drops else ()
            found = self._gradients(*inputs_and_targets(tokens[start : start + micro]), *keys)
            summed = found if summed is None else self._add(*summed, *found)
        assert summed is not None
        return summed


class _Gradients(nn.Cell):
    """(ids, targets, dropout keys) of a micro batch -> its part of the mean loss, and of the gradients times the loss scale."""

    def __init__(self, model: GPT2, config: RunConfig, loss_scale: DeviceLossScale) -> None:
        super().__init__(auto_prefix=False)
        assert config.train.global_batch_size is not None
        self.predicted = config.train.global_batch_size * config.model.seq_length
        self.model = model
        self.scale = loss_scale.value
        self.sum_dtype = DTYPES[config.precision.reduction]
        self.casts = config.precision.parameters not in ("float32", config.precision.reduction)
        self.parameters = ms.ParameterTuple(tuple(model.get_parameters()))
        self.value_and_grad = ms.value_and_grad(self.scaled_loss, None, self.parameters, has_aux=True)

    def construct(self, ids: Tensor, targets: Tensor, keys: Tensor = None) -> tuple[Tensor, ...]:
        (_, loss), gradients = self.value_and_grad(ids, targets, keys)
        if self.casts:  # the type in which gradients of weights below float32 are summed
            gradients = ops.HyperMap()(ops.partial(_cast, self.sum_dtype), gradients)
        return (loss / self.predicted, *gradients)

    def scaled_loss(self, ids: Tensor, targets: Tensor, keys: Tensor = None) -> tuple[Tensor, Tensor]:
        loss = self.model.loss_sum(ids, targets, keys)
        return loss * (self.scale / self.predicted), loss


def _cast(dtype: ms.Type, gradient: Tensor) -> Tensor:
    return ops.cast(gradient, dtype)


@dataclass(frozen=True, kw_only=True)
class _QueuedStep:
    """A step under way on the device."""

    loss: Tensor
    norm: Tensor
    applied: Tensor
    scale: Tensor
    rate: float

    def read(self) -> StepResult:
        """Wait for the step."""
        return StepResult(
            loss=float(self.loss.asnumpy()),
            grad_norm=float(self.norm.asnumpy()),
            learning_rate=self.rate,
            loss_scale=float(self.scale.asnumpy()),
            skipped=not bool(self.applied.asnumpy()),
        )

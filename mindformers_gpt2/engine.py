"""One device: forward, backward, accumulate, clip, step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from common.config.schema import RunConfig
from common.dataset import Batch
from common.training.checkpoint import Snapshot
from common.training.loop import StepResult, Tokens
from common.training.loss_scale import LossScale, clip_factor
from common.training.schedule import learning_rate
from common.training.state import TrainState
from mindformers_gpt2.checkpoint import take_snapshot
from mindformers_gpt2.data import inputs_and_targets
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.model import GPT2
from mindformers_gpt2.optimizer import add_gradients, build_optimizer, global_norm


class Engine:
    """Implements ``common.training.loop.Engine`` for one device. The config must be resolved."""

    steps_per_run = 1

    def __init__(self, model: GPT2, config: RunConfig, device: MindSporeDevice, **record: Any) -> None:
        """``record``: plain data kept in every checkpoint's manifest."""
        self.model = model
        self.config = config
        self.device = device
        self.record = record
        self.step = 0
        self.loss_scale = LossScale(config.loss_scale)
        self.tensors = {parameter.name: parameter for parameter in model.get_parameters()}
        self.optimizer = build_optimizer(self.tensors, config.optimizer)
        self._loss_sum = ms.jit(model.loss_sum)

        def scaled_loss(ids: Tensor, targets: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
            loss = model.loss_sum(ids, targets)
            return loss * factor, loss

        self._gradients = ms.jit(ms.value_and_grad(scaled_loss, None, list(self.tensors.values()), has_aux=True))

    def run(self, batches: Iterator[Batch], steps: int) -> list[StepResult]:
        return [self._train_step(next(batches).tokens) for _ in range(steps)]

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        total, tokens = 0.0, 0
        for batch in batches:
            ids, targets = inputs_and_targets(batch)
            total += float(self._loss_sum(ids, targets).asnumpy())
            tokens += targets.size
        return total, tokens

    def snapshot(self, state: TrainState) -> Snapshot:
        return take_snapshot(self, state)

    def _train_step(self, tokens: NDArray[np.int32]) -> StepResult:
        self.step += 1
        scale = self.loss_scale.value
        loss, gradients = self._accumulate_gradients(tokens, scale)
        norm = float(global_norm(*gradients).asnumpy()) / scale
        rate = learning_rate(self.config.optimizer, self.step)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            self.optimizer.step(gradients, rate, clip_factor(norm, self.config.optimizer.clip_grad) / scale)
        self.loss_scale.update(finite)
        return StepResult(loss=loss, grad_norm=norm, learning_rate=rate, loss_scale=scale, skipped=not finite)

    def _accumulate_gradients(self, tokens: NDArray[np.int32], scale: float) -> tuple[float, tuple[Tensor, ...]]:
        """Mean loss of the batch, and its gradients times ``scale``."""
        micro = self.config.train.micro_batch_size
        assert micro is not None
        predicted = tokens.shape[0] * (tokens.shape[1] - 1)
        factor = Tensor(np.float32(scale / predicted))
        total, summed = 0.0, None
        for start in range(0, tokens.shape[0], micro):
            (_, loss), gradients = self._gradients(*inputs_and_targets(tokens[start : start + micro]), factor)
            summed = gradients if summed is None else add_gradients(*summed, *gradients)
            total += float(loss.asnumpy()) / predicted
        assert summed is not None
        return total, summed

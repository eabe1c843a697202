"""Forward, backward, accumulate, clip, step: one device, or one of several that share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from common.config.load import flatten
from common.dataset import Batch
from common.parallel.resolved_run import TrainingRun
from common.parallel.sharding import slices_of_rank
from common.training.checkpoint_writer import Snapshot
from common.training.loop import StepResult, Tokens
from common.training.outliers import NO_LIMITS, Limits
from common.training.schedule import learning_rate
from common.training.state import TrainState
from mindformers_gpt2.checkpoint import take_snapshot
from mindformers_gpt2.data import inputs_and_targets
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.gradients import LossGradients
from mindformers_gpt2.model import GPT2
from mindformers_gpt2.optimizer import DeviceLossScale, MasterWeights, add_gradients, build_optimizer, global_norm
from mindformers_gpt2.parallel.layout import GradientSync, own_dropout_keys
from mindformers_gpt2.parallel.pipeline_parallel import Pipeline
from mindformers_gpt2.parallel.world import World


class Engine:
    """Implements ``common.training.loop.Engine`` for the device of one rank.

    A step is two graphs, gradients of a micro batch and update, which wait for nothing on the host: ``run`` starts all its steps
    before it reads the first result. Only a pipeline waits, for the messages between its stages.
    """

    def __init__(
        self,
        model: GPT2,
        config: TrainingRun,
        device: MindSporeDevice,
        record: Mapping[str, Any] | None = None,
        world: World | None = None,
    ) -> None:
        """``model``: or its part on this rank. ``record``: plain data kept in every checkpoint's manifest. ``world``: the ranks, where
        there are several."""
        self.model = model
        self.config = config
        self.device = device
        self.record = dict(record or {})
        self.world = world or World()
        self.step = 0
        self.steps_per_run = config.train.sink_size
        self.loss_scale = DeviceLossScale(config.loss_scale)
        parameters = {parameter.name: parameter for parameter in model.get_parameters()}
        several = self.world.size > 1
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._sharing = GradientSync(config, self.world, shapes, has_loss=self._has_loss) if several else None
        shares = self._sharing.data_parallel if self._sharing is not None and self._sharing.data_parallel.splits else None
        self.master = MasterWeights(parameters, shares)
        self.optimizer = build_optimizer(self.master, config.optimizer, self.loss_scale, self._sharing)
        self.pieces = slices_of_rank(config, self.world.topology, self.world.at, parameters)
        """Which part of each parameter this rank holds."""
        self._has_met = False
        self._drops = any((config.model.embedding_dropout, config.model.attention_dropout, config.model.hidden_dropout))
        piped = self.world.topology.pipeline > 1
        self._pipeline = Pipeline(model, config, self.world, device, self.loss_scale) if piped else None
        self._loss_sum = device.compile(model.loss_sum) if self._pipeline is None else self._pipeline.evaluate
        self._gradients = device.compile(LossGradients(model, config, self.loss_scale)) if self._pipeline is None else None
        self._add = device.compile(add_gradients)
        self._update = device.compile(self.optimizer)

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        self.world.meet()
        bounds = Tensor((limits.loss, limits.grad_norm), ms.float32)
        queued = [self._train_step(next(batches).tokens, bounds) for _ in range(steps)]
        return [step.read() for step in queued]

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        total, tokens = sum_losses(self._loss_sum, batches)
        total, all_tokens = self.world.sum(total, tokens) if self._has_loss else self.world.sum(0.0, 0.0)
        return total, int(all_tokens)

    @property
    def _has_loss(self) -> bool:
        """Whether this rank's loss counts: the last stage has it, and all tensor-parallel ranks have the same."""
        return self.world.at.tensor == 0 and self.world.topology.holds_head(self.world.rank)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different parts of the weights, so that each writes its own."""
        topology = self.world.topology
        return topology.tensor > 1 or topology.pipeline > 1 or self.master.shares is not None

    def writes(self, name: str) -> bool:
        """Whether this rank is the one, of those that hold the same part of a parameter, that counts and writes it."""
        return self._sharing is None or self._sharing.counts(name)

    def snapshot(self, state: TrainState) -> Snapshot | None:
        if self.world.rank and not self.is_sharded:
            return None
        return take_snapshot(self, state)

    def identity(self, state: TrainState) -> dict[str, Any]:
        """What must be the same on every rank before the first step."""
        facts = {"data": self.record.get("data"), "state": state.to_dict()}
        return dict(flatten(self.config.model_dump(exclude={"context"}))) | facts

    def norm_of_weights(self) -> float:
        """Of this rank's part alone; ranks that hold the same part must have the same."""
        return float(global_norm(*self.master.tensors.values()).asnumpy())

    def norm_of_moments(self) -> float:
        """As norm_of_weights, of the optimizer's state; 0 before the first step."""
        found = [tensor for tensors in self.optimizer.state.values() for tensor in tensors.values()]
        return float(global_norm(*found).asnumpy()) if found else 0.0

    def _train_step(self, tokens: NDArray[np.int32], limits: Tensor) -> _QueuedStep:
        self.step += 1
        rate = learning_rate(self.config.optimizer, self.step)
        loss, *gradients = self._accumulate_gradients(tokens)
        if not self._has_met:
            self.world.meet()  # after compiling
            self._has_met = True
        loss, norm, applied, scale = self._update(Tensor(rate, ms.float32), limits, loss, *gradients)
        return _QueuedStep(loss=loss, norm=norm, applied=applied, scale=scale, rate=rate)

    def _accumulate_gradients(self, tokens: NDArray[np.int32]) -> tuple[Tensor, ...]:
        """This rank's part of the mean loss of the global batch, and of its gradients times the loss scale."""
        micro = self.config.train.micro_batch_size
        batch = [inputs_and_targets(tokens[start : start + micro]) for start in range(0, tokens.shape[0], micro)]
        if self._pipeline is not None:
            return self._pipeline.step(batch, self._dropout_keys)
        assert self._gradients is not None
        summed: tuple[Tensor, ...] | None = None
        for number, (ids, targets) in enumerate(batch):
            found = self._gradients(ids, targets, *self._dropout_keys(number))
            summed = found if summed is None else self._add(*summed, *found)
        assert summed is not None
        return summed

    def _dropout_keys(self, number: int) -> tuple[Tensor, ...]:
        """Of a micro batch of this rank."""
        if not self._drops:
            return ()
        return (Tensor(own_dropout_keys(self.config, self.world, self.step, number)),)


def sum_losses(loss_sum: Callable[[Tensor, Tensor], Tensor], batches: Iterable[Tokens]) -> tuple[float, int]:
    """Sum of the losses over all predicted tokens of this rank, in nats, and their number."""
    total, tokens = 0.0, 0
    for batch in batches:
        if not len(batch):  # nor have the ranks that need this one's part of the model
            continue
        ids, targets = inputs_and_targets(batch)
        total += float(loss_sum(ids, targets).asnumpy())
        tokens += targets.size
    return total, tokens


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

"""Forward, backward, accumulate, clip, step: one device, or one of several that sum their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config.load import flatten
from common.dataset import Batch
from common.parallel.resolved_run import TrainingRun
from common.parallel.sharding import slices_of_rank
from common.training.checkpoint_writer import Snapshot
from common.training.loop import StepResult, Tokens
from common.training.loss_scale import LossScale, clip_factor
from common.training.outliers import NO_LIMITS, Limits
from common.training.schedule import learning_rate
from common.training.snapshot import STATE_NAMES
from common.training.state import TrainState
from torch_gpt2.checkpoint import take_snapshot
from torch_gpt2.data import inputs_and_targets
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.evaluate import sum_losses
from torch_gpt2.model import GPT2
from torch_gpt2.optimizer import MasterWeights, build_optimizer, global_norm, local_shard, scale_gradients
from torch_gpt2.parallel.layout import GradientSync
from torch_gpt2.parallel.pipeline_parallel import Pipeline
from torch_gpt2.parallel.replica_strategies import replicate
from torch_gpt2.parallel.world import World


class Engine:
    """Implements ``common.training.loop.Engine`` for the device of one rank."""

    steps_per_run = 1

    def __init__(
        self,
        model: GPT2 | list[GPT2],
        config: TrainingRun,
        device: TorchDevice,
        record: Mapping[str, Any] | None = None,
        world: World | None = None,
    ) -> None:
        """``model``: or its parts on this rank. ``record``: plain data kept in every checkpoint's manifest. ``world``: the ranks, where
        there are several."""
        self.parts = model if isinstance(model, list) else [model]
        self.model = self.parts[0]
        self.config = config
        self.device = device
        self.record = dict(record or {})
        self.world = world or World()
        self.step = 0
        self.loss_scale = LossScale(config.loss_scale)
        parameters = {name: parameter for part in self.parts for name, parameter in part.named_parameters()}
        self.master = MasterWeights(parameters, DTYPES[config.precision.reduction])
        self.optimizer = build_optimizer(self.master.tensors, config.optimizer, fused=device.fused_optimizer)
        self._lent: Snapshot | None = None
        """What the checkpoint writer may still be reading."""
        self._loss_sum = torch.compile(self.parts[0].loss_sum) if config.train.compile else self.parts[0].loss_sum
        self._data_parallel = replicate(self.parts, self._loss_sum, config, self.world, device, self.master.tensors)
        self._sharing = GradientSync(config, self.world)
        self.pieces = slices_of_rank(config, self.world.topology, self.world.at, parameters)
        """Which part of each parameter this rank holds."""
        self._pipeline = Pipeline(self.parts, config, self.world, device) if self.world.topology.pipeline > 1 else None

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        for part in self.parts:
            part.train()
        return [self._train_step(next(batches).tokens, limits) for _ in range(steps)]

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        loss_sum = self._pipeline.evaluate if self._pipeline is not None else self._loss_sum
        return sum_losses(self.parts, loss_sum, batches, self.device, self.world, counts=self._has_loss)

    @property
    def _has_loss(self) -> bool:
        """Whether this rank's loss counts: the last stage has it, and all tensor-parallel ranks have the same."""
        return self.world.at.tensor == 0 and (self._pipeline is None or self._pipeline.has_loss)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different parts of the weights, so that each writes its own."""
        return not self._sharing.alone

    def writes(self, name: str) -> bool:
        """Whether this rank is the one, of those that hold the same part of a parameter, that counts and writes it."""
        return self._sharing.counts(name)

    def local_weights(self) -> dict[str, Tensor]:
        """What this rank holds of the weights that the optimizer updates."""
        return {name: local_shard(tensor.detach()) for name, tensor in self.master.tensors.items()}

    def snapshot(self, state: TrainState) -> Snapshot | None:
        generators = self.world.gather(self.device.rng_state())
        if self.world.rank and not self.is_sharded:
            return None
        snapshot = take_snapshot(self, state, generators)
        self._lent = snapshot if self.device.kind == "cpu" else None  # other devices have copied
        return snapshot

    def identity(self, state: TrainState) -> dict[str, Any]:
        """What must be the same on every rank before the first step."""
        facts = {"data": self.record.get("data"), "state": state.to_dict()}
        return dict(flatten(self.config.model_dump(exclude={"context"}))) | facts

    def norm_of_weights(self) -> float:
        """Of this rank's part alone; ranks that hold the same part must have the same."""
        return global_norm(list(self.local_weights().values())).item()

    def norm_of_moments(self) -> float:
        """As norm_of_weights, of the optimizer's state; 0 before the first step."""
        parts = STATE_NAMES[self.config.optimizer.name]
        found = [state[part] for state in self.optimizer.state.values() for part in parts if state.get(part) is not None]
        return global_norm([local_shard(values) for values in found]).item() if found else 0.0

    def _train_step(self, tokens: NDArray[np.int32], limits: Limits) -> StepResult:
        self.step += 1
        scale = self.loss_scale.value
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate_gradients(tokens, scale)
        gradients = self.master.take_gradients()
        self._data_parallel.sum_gradients(list(gradients.values()))
        self._sharing.complete(gradients)
        if self._sharing.alone:
            norm = self._data_parallel.norm(global_norm(list(gradients.values()))).item() / scale
        else:
            norm = self._sharing.norm(gradients) / scale
        rate = learning_rate(self.config.optimizer, self.step)
        finite = math.isfinite(norm) and math.isfinite(loss)
        applied = finite and not limits.exceeded(loss, norm)
        if applied:
            scale_gradients(list(gradients.values()), clip_factor(norm, self.config.optimizer.clip_grad) / scale)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            if self._lent is not None:
                self._lent.keep()
                self._lent = None
            self._data_parallel.update(self.optimizer.step)
            self.master.write_back()
        self.loss_scale.update(finite)
        return StepResult(loss=loss, grad_norm=norm, learning_rate=rate, loss_scale=scale, skipped=not applied)

    def _accumulate_gradients(self, tokens: NDArray[np.int32], scale: float) -> float:
        """Mean loss of the global batch; its gradient, times ``scale``, is left in the parameters."""
        micro, samples = self.config.train.micro_batch_size, self.config.train.global_batch_size
        predicted = samples * (tokens.shape[1] - 1)
        if self._pipeline is not None:
            ids, targets = inputs_and_targets(tokens, self.device)
            with self._data_parallel.micro_batch(last=True):
                total = self._pipeline.step(ids, targets, lambda loss: loss * (scale / predicted)) / scale
            return self.world.sum(total.item() if self._has_loss else 0.0)[0]
        total = torch.zeros((), device=self.device.torch_device)
        starts = range(0, tokens.shape[0], micro)
        for start in starts:
            ids, targets = inputs_and_targets(tokens[start : start + micro], self.device)
            with self._data_parallel.micro_batch(last=start == starts[-1]):
                loss = self._data_parallel.loss_sum(ids, targets) / predicted
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return self.world.sum(total.item() if self._has_loss else 0.0)[0]

"""Forward, backward, accumulate, clip, step: one device, or one of several that sum their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.config.load import flatten
from common.config.schema import RunConfig
from common.dataset import Batch
from common.training.checkpoint import Snapshot
from common.training.loop import StepResult, Tokens
from common.training.loss_scale import LossScale, clip_factor
from common.training.outliers import NO_LIMITS, Limits
from common.training.schedule import learning_rate
from common.training.state import TrainState
from torch_gpt2.checkpoint import take_snapshot
from torch_gpt2.data import inputs_and_targets
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.model import GPT2
from torch_gpt2.optimizer import MasterWeights, build_optimizer, global_norm, scale_gradients
from torch_gpt2.parallel import DataParallel, World


class Engine:
    """Implements ``common.training.loop.Engine`` for the device of one rank. The config must be resolved."""

    steps_per_run = 1

    def __init__(
        self, model: GPT2, config: RunConfig, device: TorchDevice, record: Mapping[str, Any] | None = None, world: World | None = None
    ) -> None:
        """``record``: plain data kept in every checkpoint's manifest. ``world``: the ranks, where there are several."""
        self.model = model
        self.config = config
        self.device = device
        self.record = dict(record or {})
        self.world = world or World()
        self.step = 0
        self.loss_scale = LossScale(config.loss_scale)
        self.master = MasterWeights(dict(model.named_parameters()), DTYPES[config.precision.reduction])
        self.optimizer = build_optimizer(self.master.tensors, config.optimizer, fused=device.fused_optimizer)
        self._lent: Snapshot | None = None
        """What the checkpoint writer may still be reading."""
        self._loss_sum = torch.compile(model.loss_sum) if config.train.compile else model.loss_sum
        self._parallel = DataParallel(model, self._loss_sum, config, self.world)

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        self.model.train()
        return [self._train_step(next(batches).tokens, limits) for _ in range(steps)]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        self.model.eval()
        total, tokens = 0.0, 0
        for batch in batches:
            ids, targets = inputs_and_targets(batch, self.device)
            total += self._loss_sum(ids, targets).item()
            tokens += targets.numel()
        total, all_tokens = self.world.sum(total, tokens)
        return total, int(all_tokens)

    def snapshot(self, state: TrainState) -> Snapshot | None:
        generators = self.world.gather(self.device.rng_state())
        if self.world.rank:
            return None
        snapshot = take_snapshot(self, state, generators)
        self._lent = snapshot if self.device.kind == "cpu" else None  # other devices have copied
        return snapshot

    def identity(self, state: TrainState) -> dict[str, Any]:
        """What must be the same on every rank before the first step."""
        norm = global_norm([tensor.detach() for tensor in self.master.tensors.values()]).item()
        facts = {"data": self.record.get("data"), "state": state.to_dict(), "norm of the weights": norm}
        return dict(flatten(self.config.model_dump(exclude={"context"}))) | facts

    def _train_step(self, tokens: NDArray[np.int32], limits: Limits) -> StepResult:
        self.step += 1
        scale = self.loss_scale.value
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate_gradients(tokens, scale)
        gradients = self.master.take_gradients()
        self._parallel.sum_gradients(gradients)
        norm = global_norm(gradients).item() / scale
        rate = learning_rate(self.config.optimizer, self.step)
        finite = math.isfinite(norm) and math.isfinite(loss)
        applied = finite and not limits.exceeded(loss, norm)
        if applied:
            scale_gradients(gradients, clip_factor(norm, self.config.optimizer.clip_grad) / scale)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            if self._lent is not None:
                self._lent.keep()
                self._lent = None
            self.optimizer.step()
            self.master.write_back()
        self.loss_scale.update(finite)
        return StepResult(loss=loss, grad_norm=norm, learning_rate=rate, loss_scale=scale, skipped=not applied)

    def _accumulate_gradients(self, tokens: NDArray[np.int32], scale: float) -> float:
        """Mean loss of the global batch; its gradient, times ``scale``, is left in the parameters."""
        micro, samples = self.config.train.micro_batch_size, self.config.train.global_batch_size
        assert micro is not None and samples is not None
        predicted = samples * (tokens.shape[1] - 1)
        total = torch.zeros((), device=self.device.torch_device)
        starts = range(0, tokens.shape[0], micro)
        for start in starts:
            ids, targets = inputs_and_targets(tokens[start : start + micro], self.device)
            with self._parallel.micro_batch(last=start == starts[-1]):
                loss = self._parallel.loss_sum(ids, targets) / predicted
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return self.world.sum(total.item())[0]

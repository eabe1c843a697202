"""DeepSpeed behind ``common.training.engine.Engine``: ZeRO 0 to 3, offload, pipeline with ZeRO-1.

Model, data, loop and checkpoints are the native engine's, so that a run moves between the two. The
package is imported when an engine is made, and not before.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.cluster.environment import ALONE, Process, torch_variables
from common.dataset import Batch, Tokens
from common.errors import ConfigError, DeviceError
from common.parallel.resolved_run import TrainingRun
from common.resolve.engine_checks import read_deepspeed_file
from common.resolve.vendor_settings import deepspeed_settings
from common.training.checkpoint_reader import CheckpointReader
from common.training.checkpoint_writer import Snapshot
from common.training.engine import StepResult
from common.training.loss_scale import clip_factor
from common.training.outliers import NO_LIMITS, Limits
from common.training.schedule import learning_rate
from common.training.state import TrainState
from common.weights.initial import initial_rows
from torch_gpt2.base_engine import BaseEngine
from torch_gpt2.data import inputs_and_targets
from torch_gpt2.deepspeed.pipeline import build_pipeline
from torch_gpt2.deepspeed.private_api import forget_groups, leave_out_shared_memory
from torch_gpt2.deepspeed.state import DeepSpeedState, Values
from torch_gpt2.device import TorchDevice
from torch_gpt2.model import GPT2, build_model
from torch_gpt2.optimizer import build_optimizer, global_norm, parameter_groups, scale_gradients
from torch_gpt2.parallel.world import World


class DeepSpeedEngine(BaseEngine):
    """Steps by DeepSpeed.

    Raises ConfigError when the package is absent, and DeviceError for float16 weights on a CPU.
    """

    def __init__(
        self,
        config: TrainingRun,
        device: TorchDevice,
        process: Process = ALONE,
        world: World | None = None,
        manifest_extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, device, process, world, manifest_extra)
        self.updates = 0
        """Steps that were not skipped."""
        self.settings = deepspeed_settings(config, read_deepspeed_file(config))
        self._ranks = config.parallel.data_parallel
        self._pipeline = config.parallel.pipeline_stage > 1
        self._deepspeed = _open_deepspeed(config, device, process)
        self._module, self._model = (
            build_pipeline(self._deepspeed, config, device, process.rank)
            if self._pipeline
            else _build_whole(config, device)
        )
        self._parameters = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if not parameter.is_meta
        }
        self._state = DeepSpeedState(self._parameters, config, self.world, device.torch_device)

    def run(
        self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS
    ) -> list[StepResult]:
        """Ignore ``limits``, which the config's checks refuse: DeepSpeed tells the norm too
        late.
        """
        return [self._train_step(next(batches).tokens) for _ in range(steps)]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """All ranks go through equally many batches, as ZeRO-3 and pipelines need; those who run
        out add some that do not count.
        """
        self._engine.eval()
        config = self.config
        # so many at once keep a pipeline busy
        width = 4 * config.parallel.pipeline_stage if self._pipeline else 1
        blank = np.zeros(
            (config.validation.micro_batch_size, config.model.seq_length + 1), np.int32
        )
        total, tokens = 0.0, 0
        rest = iter(batches)
        while True:
            mine = list(itertools.islice(rest, width))
            most = self.world.all_reduce_max(len(mine))
            if not most:
                break
            losses = self._mean_losses(
                [batch if len(batch) else blank for batch in [*mine, *[blank] * (most - len(mine))]]
            )
            for batch, loss in zip(mine, losses, strict=False):
                predicted = batch.shape[0] * (batch.shape[1] - 1)  # 0 where a rank had none left
                total += loss * predicted if predicted else 0.0
                tokens += predicted
        total, all_tokens = self.world.sum(total, tokens)
        return total, int(all_tokens)

    def snapshot(self, state: TrainState) -> Snapshot | None:
        generators = self.world.gather(self.device.rng_state())
        weights, moments = self._state.weights(), self._state.moments() if self.updates else {}
        if self.world.rank:
            return None
        return self._make_snapshot(
            state,
            weights,
            moments,
            optimizer_steps=self.updates,
            generators=generators,
            versions={"deepspeed": self._deepspeed.__version__},
        )

    def identity(self) -> dict[str, Any]:
        return {"DeepSpeed's settings": self.settings}

    def norm_of_weights(self) -> float:
        return self._state.norm_of_weights()

    def norm_of_moments(self) -> float:
        return self._state.norm_of_moments()

    def _fill_weights(self, reader: CheckpointReader | None) -> None:
        """Give DeepSpeed the filled parameters, which it may cut up, and the float32 copies."""
        self._state.fill(self._weights(reader))
        optimizer: dict[str, Any] = (
            {"model_parameters": parameter_groups(self._parameters, self.config.optimizer)}
            if "optimizer" in self.settings  # DeepSpeed's own kernels
            else {
                "optimizer": build_optimizer(
                    self._parameters, self.config.optimizer, fused=self.device.fused_optimizer
                )
            }
        )
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints
            self._engine, self.optimizer, _, _ = self._deepspeed.initialize(
                model=self._module, config=self.settings, **optimizer
            )
        self._state.attach(self._engine, self._deepspeed.utils)
        if self.config.precision.parameters != "float32":
            self._state.fill_masters(self._weights(reader))
        if self.config.parallel.zero_stage == 3:  # the loss reads it outside its own module
            self._deepspeed.zero.register_external_parameter(self._module, self._model.wte.weight)

    def _weights(self, reader: CheckpointReader | None) -> Values:
        """Names and values of a checkpoint's weights, or of the initial ones."""
        config = self.config
        if reader is not None:
            return reader.weights(config.model)
        shapes = {
            name: tuple(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in self._parameters.items()
        }
        return (
            (name, initial_rows(config.model, config.seed, name, shape))
            for name, shape in shapes.items()
        )

    def _fill_moments(self, reader: CheckpointReader, optimizer_steps: int) -> None:
        moments = reader.moments(self.config, optimizer_steps)
        first = next(moments, None)
        if first is not None:
            self._make_moments()
            self._state.fill_moments(itertools.chain([first], moments), optimizer_steps)
            self.updates = max(optimizer_steps, 1)

    def _train_step(self, tokens: Tokens) -> StepResult:
        self.step += 1
        scale = self.loss_scale.value
        rate = learning_rate(self.config.optimizer, self.step)
        loss, norm = self._update(tokens, rate, scale)
        # -1 is how some of DeepSpeed's optimizers say that it is not
        finite = math.isfinite(norm) and norm >= 0
        self.updates += finite
        self.loss_scale.update(finite)
        return StepResult(
            loss=loss,
            grad_norm=norm if finite else math.inf,
            learning_rate=rate,
            loss_scale=scale,
            skipped=not finite,
        )

    def _update(self, tokens: Tokens, rate: float, scale: float) -> tuple[float, float]:
        """Loss of one step and its norm before clipping. DeepSpeed leaves the weights as they are
        where the norm is not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # DeepSpeed averages over ranks, the native engine sums: so a micro batch overflows at the
        # same scale on any number of ranks
        scale /= self._ranks
        zero = self.config.parallel.zero_stage > 0
        if zero and self.config.loss_scale.mode != "none":
            self.optimizer.override_loss_scale(scale)
        self._engine.train()
        micro = self.config.train.micro_batch_size
        pieces = [tokens[start : start + micro] for start in range(0, len(tokens), micro)]
        if self._pipeline:
            loss = self._engine.train_batch(
                inputs_and_targets(piece, self.device) for piece in pieces
            ).item()
            return loss, float(self._engine.get_global_grad_norm())
        total, norm = 0.0, 0.0
        for piece in pieces:
            mean = self._engine(*inputs_and_targets(piece, self.device))
            self._engine.backward(mean if zero else mean * scale)
            if not zero and piece is pieces[-1]:
                norm = self._unscale_and_clip(scale)
            self._engine.step()
            total += mean.item()
        loss = self.world.sum(total)[0] / (len(pieces) * self._ranks)
        return loss, float(self._engine.get_global_grad_norm()) if zero else norm

    def _unscale_and_clip(self, scale: float) -> float:
        """ZeRO-0 steps with torch's bare optimizer, which knows of no loss scale and would apply
        what is not finite; its clip on a CPU has the norm of few digits that ``global_norm`` speaks
        of.
        """
        parameters = self._state.parameters.values()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = global_norm(gradients).item() / scale
        scale_gradients(gradients, clip_factor(norm, self.config.optimizer.clip_grad) / scale)
        if not math.isfinite(norm):
            for parameter in parameters:
                parameter.grad = None
        return norm

    def _mean_losses(self, batches: list[Tokens]) -> list[float]:
        """Of each batch; in a pipeline on the ranks of the last stage alone."""
        pairs = (inputs_and_targets(batch, self.device) for batch in batches)
        if not self._pipeline:
            return [self._engine(*pair).item() for pair in pairs]
        losses = self._engine.eval_batch(
            pairs,
            reduce_output=None,
            compute_loss=True,
            bcast_loss=False,
            num_micro_batches=len(batches),
        )
        return [] if losses is None else [loss.item() for loss in losses]

    def _make_moments(self) -> None:
        """DeepSpeed has no place for moments before the first step: make one that changes no
        weight.
        """
        train = self.config.train
        shape = (
            train.micro_batch_size * train.accumulation_steps,
            self.config.model.seq_length + 1,
        )
        self._update(np.zeros(shape, np.int32), rate=0.0, scale=1.0)


def _open_deepspeed(config: TrainingRun, device: TorchDevice, process: Process) -> Any:
    """The package, told which device to use and which processes there are."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "engine=deepspeed: the package is not installed; pip install 'gpt2-toolkit[deepspeed]',"
            " or set engine=native"
        )
    if device.kind == "cpu" and config.precision.parameters == "float16":
        raise DeviceError(
            "precision.parameters=float16: DeepSpeed refuses it on a CPU; use precision=fp16, bf16"
            " or float32 there"
        )
    os.environ["DS_ACCELERATOR"] = device.kind
    deepspeed = importlib.import_module("deepspeed")
    if not config.deepspeed.build_kernels:
        leave_out_shared_memory(deepspeed)
    forget_groups(deepspeed)
    # it takes the device with the number LOCAL_RANK
    local_rank = process.local_rank if device.kind == "cpu" else device.index
    os.environ.update(torch_variables(process) | {"LOCAL_RANK": str(local_rank)})
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(device.communication_backend, store=store, rank=0, world_size=1)
    # 0.19 still calls torch's collectives by their older names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_backend=device.communication_backend)
    return deepspeed


class _MeanLossModule(nn.Module):
    """Mean loss of ids and targets (B, T): DeepSpeed watches the forward of a module."""

    def __init__(self, model: GPT2, config: TrainingRun) -> None:
        super().__init__()
        self.model = model
        self._loss_sum = torch.compile(model.loss_sum) if config.train.compile else model.loss_sum

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        mean: Tensor = self._loss_sum(ids, targets) / targets.numel()
        return mean


def _build_whole(config: TrainingRun, device: TorchDevice) -> tuple[nn.Module, GPT2]:
    model = build_model(config, device)
    return _MeanLossModule(model, config), model

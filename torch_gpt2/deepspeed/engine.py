"""DeepSpeed behind ``common.training.loop.Engine``: ZeRO 0 to 3, offload, pipeline with ZeRO-1.

Model, data, loop and checkpoints are the native engine's, so that a run moves between the two. The package is imported when an engine
is made, and not before.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from common.cluster.environment import Process, torch_variables
from common.config.load import flatten
from common.dataset import Batch
from common.errors import ConfigError, DeviceError
from common.parallel.resolved_run import ResolvedRun, TrainingRun
from common.resolve.engine_checks import read_deepspeed_file
from common.resolve.vendor_settings import deepspeed_settings
from common.training.checkpoint_writer import Snapshot
from common.training.loop import StepResult, Tokens
from common.training.loss_scale import LossScale, clip_factor
from common.training.outliers import NO_LIMITS, Limits
from common.training.schedule import learning_rate
from common.training.setup import Start
from common.training.snapshot import EngineState, make_snapshot, read_moments, read_states, read_weights
from common.training.state import TrainState
from common.weights.initial import initial_rows
from torch_gpt2.checkpoint import restore_generators
from torch_gpt2.data import inputs_and_targets
from torch_gpt2.deepspeed.state import DeepSpeedState, Values
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.loss import cross_entropy_sum
from torch_gpt2.model import GPT2, build_meta_model, build_model
from torch_gpt2.optimizer import build_optimizer, global_norm, parameter_groups, scale_gradients
from torch_gpt2.parallel.world import World


class DeepSpeedEngine:
    """Implements ``common.training.loop.Engine`` for one rank, with the weights that ``start`` names.

    Raises ConfigError when the package is absent, and DeviceError for float16 weights on a CPU.
    """

    steps_per_run = 1

    def __init__(
        self,
        config: TrainingRun,
        device: TorchDevice,
        process: Process,
        world: World,
        start: Start,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """``record``: plain data kept in every checkpoint's manifest."""
        self.config = config
        self.device = device
        self.world = world
        self.record = dict(record or {})
        self.step = 0
        self.updates = 0
        """Steps that were not skipped."""
        self.loss_scale = LossScale(config.loss_scale)
        self.settings = deepspeed_settings(config, read_deepspeed_file(config))
        self._ranks = config.parallel.data_parallel
        self._pipeline = config.parallel.pipeline_stage > 1
        deepspeed = _open_deepspeed(config, device, process)
        self._version = deepspeed.__version__
        module, model = _build_pipeline(deepspeed, config, device, process.rank) if self._pipeline else _build_whole(config, device)
        parameters = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
        self._state = DeepSpeedState(parameters, config, world, device.torch_device)
        self._state.fill(_weights(config, start, parameters))
        optimizer: dict[str, Any] = (
            {"model_parameters": parameter_groups(parameters, config.optimizer)}  # for DeepSpeed's own kernels
            if "optimizer" in self.settings
            else {"optimizer": build_optimizer(parameters, config.optimizer, fused=device.fused_optimizer)}
        )
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints
            self._engine, self.optimizer, _, _ = deepspeed.initialize(model=module, config=self.settings, **optimizer)
        self._state.attach(self._engine, deepspeed.utils)
        if config.precision.parameters != "float32":
            self._state.fill_masters(_weights(config, start, parameters))
        if config.parallel.zero_stage == 3:  # the loss reads it outside the module to which it belongs
            deepspeed.zero.register_external_parameter(module, model.wte.weight)

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        """``limits`` were refused with the config: DeepSpeed tells the norm of a step after its update."""
        return [self._train_step(next(batches).tokens) for _ in range(steps)]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """All ranks go through equally many batches, as ZeRO-3 and pipelines need; those who run out add some that do not count."""
        self._engine.eval()
        config = self.config
        width = 4 * config.parallel.pipeline_stage if self._pipeline else 1  # so many at once keep a pipeline busy
        blank = np.zeros((config.validation.micro_batch_size, config.model.seq_length + 1), np.int32)
        total, tokens = 0.0, 0
        rest = iter(batches)
        while True:
            mine = list(itertools.islice(rest, width))
            most = self.world.all_reduce_max(len(mine))
            if not most:
                break
            losses = self._mean_losses([batch if len(batch) else blank for batch in [*mine, *[blank] * (most - len(mine))]])
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
        return make_snapshot(
            self.config,
            state,
            weights=weights,
            moments=moments,
            engine=EngineState(optimizer_steps=self.updates, loss_scale=self.loss_scale.state(), rng={"torch": generators}),
            versions={"backend": "torch", "torch": torch.__version__, "deepspeed": self._version},
            record=self.record,
        )

    def restore(self, checkpoint: Path) -> TrainState:
        """Put the engine where the checkpoint was taken, apart from the weights, which it has since it was made."""
        state, saved = read_states(checkpoint, self.config, self.loss_scale)
        moments = read_moments(checkpoint, self.config, saved.optimizer_steps)
        first = next(moments, None)
        if first is not None:
            self._make_moments()
            self._state.fill_moments(itertools.chain([first], moments), saved.optimizer_steps)
            self.updates = max(saved.optimizer_steps, 1)
        restore_generators(self.device, self.world, saved, checkpoint)
        self.step = state.step
        return state

    def identity(self, state: TrainState) -> dict[str, Any]:
        """What must be the same on every rank before the first step."""
        facts = {"data": self.record.get("data"), "state": state.to_dict(), "DeepSpeed's settings": self.settings}
        return dict(flatten(self.config.model_dump(exclude={"context"}))) | facts

    def norm_of_weights(self) -> float:
        """Of this rank's part under ZeRO 0; ranks that hold the same part must have the same."""
        return self._state.norm_of_weights()

    def norm_of_moments(self) -> float:
        """As norm_of_weights, of the optimizer's state; 0 before the first step."""
        return self._state.norm_of_moments()

    def _train_step(self, tokens: NDArray[np.int32]) -> StepResult:
        self.step += 1
        scale = self.loss_scale.value
        rate = learning_rate(self.config.optimizer, self.step)
        loss, norm = self._update(tokens, rate, scale)
        finite = math.isfinite(norm) and norm >= 0  # -1 is how some of DeepSpeed's optimizers say that it is not
        self.updates += finite
        self.loss_scale.update(finite)
        return StepResult(loss=loss, grad_norm=norm if finite else math.inf, learning_rate=rate, loss_scale=scale, skipped=not finite)

    def _update(self, tokens: NDArray[np.int32], rate: float, scale: float) -> tuple[float, float]:
        """Loss of one step and its norm before clipping. DeepSpeed leaves the weights as they are where the norm is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # DeepSpeed averages over ranks, the native engine sums: so a micro batch overflows at the same scale on any number of ranks
        scale /= self._ranks
        zero = self.config.parallel.zero_stage > 0
        if zero and self.config.loss_scale.mode != "none":
            self.optimizer.override_loss_scale(scale)
        self._engine.train()
        micro = self.config.train.micro_batch_size
        pieces = [tokens[start : start + micro] for start in range(0, len(tokens), micro)]
        if self._pipeline:
            loss = self._engine.train_batch(inputs_and_targets(piece, self.device) for piece in pieces).item()
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
        """ZeRO-0 steps with torch's bare optimizer, which knows of no loss scale and would apply what is not finite; its clip on a CPU has
        the norm of few digits that ``global_norm`` speaks of."""
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
        losses = self._engine.eval_batch(pairs, reduce_output=None, compute_loss=True, bcast_loss=False, num_micro_batches=len(batches))
        return [] if losses is None else [loss.item() for loss in losses]

    def _make_moments(self) -> None:
        """DeepSpeed has no place for moments before the first step: make one that changes no weight."""
        train = self.config.train
        shape = (train.micro_batch_size * train.accumulation_steps, self.config.model.seq_length + 1)
        self._update(np.zeros(shape, np.int32), rate=0.0, scale=1.0)


def _weights(config: ResolvedRun, start: Start, parameters: Mapping[str, Tensor]) -> Values:
    checkpoint = start.resume or start.weights
    if checkpoint is not None:
        return read_weights(checkpoint, config.model)
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in parameters.items()}
    return ((name, initial_rows(config.model, config.seed, name, shape)) for name, shape in shapes.items())


def _open_deepspeed(config: ResolvedRun, device: TorchDevice, process: Process) -> Any:
    """The package, told which device to use and which processes there are."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("engine=deepspeed: the package is not installed; pip install 'gpt2-toolkit[deepspeed]', or set engine=native")
    if device.kind == "cpu" and config.precision.parameters == "float16":
        raise DeviceError("precision.parameters=float16: DeepSpeed refuses it on a CPU; use precision=fp16, bf16 or float32 there")
    os.environ["DS_ACCELERATOR"] = device.kind
    deepspeed = importlib.import_module("deepspeed")
    if not config.deepspeed.build_kernels:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a faster all-reduce for CPUs, compiled at first use
    # what it remembers of groups that an earlier run of this process has left
    deepspeed.comm.comm.cdb = None
    importlib.import_module("deepspeed.utils.groups")._release_process_group_references()
    # it takes the device with the number LOCAL_RANK
    local_rank = process.local_rank if device.kind == "cpu" else device.index
    os.environ.update(torch_variables(process) | {"LOCAL_RANK": str(local_rank)})
    if not dist.is_initialized():
        dist.init_process_group(device.communication_backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    # 0.19 still calls torch's collectives by their older names
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_backend=device.communication_backend)
    return deepspeed


class _MeanLossModule(nn.Module):
    """Mean loss of ids and targets (B, T): DeepSpeed watches the forward of a module."""

    def __init__(self, model: GPT2, config: ResolvedRun) -> None:
        super().__init__()
        self.model = model
        self._loss_sum = torch.compile(model.loss_sum) if config.train.compile else model.loss_sum

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        mean: Tensor = self._loss_sum(ids, targets) / targets.numel()
        return mean


def _build_whole(config: ResolvedRun, device: TorchDevice) -> tuple[nn.Module, GPT2]:
    model = build_model(config, device)
    return _MeanLossModule(model, config), model


# ---- the stages of a pipeline ----


class _Positions(nn.Module):
    """Between the tied token embedding and the first block."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.wpe = model.wpe
        self.dropout, self.dtype = model.dropout, model.compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wpe(torch.arange(x.shape[1], device=x.device))  # (B, T, C)
        return F.dropout(x.to(self.dtype), self.dropout, self.training)


class _StageBlocks(nn.Module):
    """The blocks of one stage; DeepSpeed cuts the list of layers so that each rank has one of these."""

    def __init__(self, model: GPT2, layers: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.h[layer] for layer in layers)
        self.recompute = model.recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=False) if self.recompute and torch.is_grad_enabled() else block(x)
        return x


def _build_pipeline(deepspeed: Any, config: ResolvedRun, device: TorchDevice, rank: int) -> tuple[nn.Module, GPT2]:
    """DeepSpeed's pipeline over the model's own blocks, and the model: only what this rank's stage uses has memory.

    The first and the last stage each have ``wte``, whose gradients DeepSpeed adds up.
    """
    topology = config.topology
    stage, last = topology.coordinates(rank).pipeline, topology.pipeline - 1
    model = build_meta_model(config)
    positions = _Positions(model)
    stages = [_StageBlocks(model, topology.layers_of_stage(number, config.model.num_layers)) for number in range(topology.pipeline)]
    for module in (stages[stage], *([positions] if stage == 0 else []), *([model.ln_f] if stage == last else [])):
        module.to_empty(device=device.torch_device)
    tied = ("wte", nn.Embedding, *model.wte.weight.shape)
    place = {"device": device.torch_device, "dtype": DTYPES[config.precision.parameters]}

    def mean_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy_sum(hidden.flatten(0, 1), model.wte.weight, targets.flatten(), config.model.vocab_size)
        return total / targets.numel()

    pipe = deepspeed.pipe
    with contextlib.redirect_stdout(io.StringIO()):
        pipeline = pipe.PipelineModule(
            layers=[
                pipe.TiedLayerSpec(*tied, **place),
                positions,
                *stages,
                model.ln_f,
                pipe.TiedLayerSpec(*tied, forward_fn=lambda wte, hidden: hidden, **place),  # the loss multiplies by it
            ],
            num_stages=topology.pipeline,
            loss_fn=mean_loss,
            partition_method=f"type:{_StageBlocks.__name__}",
            dynamic_shape=True,  # validation may have other shapes
        )
    if "wte" in pipeline.tied_modules:
        model.wte = pipeline.tied_modules["wte"]
    return pipeline, model

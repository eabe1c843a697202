"""DeepSpeed behind ``common.training.engine.Engine``: ZeRO 0 to 3, offload, tensor parallel, and
pipelines with ZeRO 0 and 1.

Model, layout, data, loop and checkpoints are the native engine's, so that a run moves between the
two. The package is imported when an engine is made, and not before.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.cluster.environment import Process, torch_variables
from common.dataset.sampler import Batch, Tokens
from common.errors import ConfigError
from common.parallel.run import Run
from common.parallel.sharding import Role, role_of
from common.parallel.topology import GroupKind, Topology
from common.paths import install
from common.resolve.engine_checks import read_deepspeed_file
from common.resolve.vendor_settings import deepspeed_settings
from common.tensor_files.safetensors_file import Tensors
from common.training.engine import NO_LIMITS, Limits, StepResult
from common.training.opened_checkpoint import Checkpoint
from common.weights.pieces import TensorSlice
from torch_gpt2.base_engine import BaseEngine
from torch_gpt2.compilation import compile_model, is_compiled
from torch_gpt2.data import inputs_and_targets
from torch_gpt2.deepspeed.private_api import allow_float16, forget_groups, leave_out_shared_memory
from torch_gpt2.deepspeed.state import DeepSpeedState, WholeState, ZeroState
from torch_gpt2.device import DTYPES, TorchDevice, wide_type
from torch_gpt2.model import GPT2
from torch_gpt2.optimizer import build_optimizer, parameter_groups
from torch_gpt2.parallel.data_parallel import LossModule, sum_over
from torch_gpt2.parallel.layout import build_parts
from torch_gpt2.parallel.world import World


class DeepSpeedEngine(BaseEngine):
    """An engine whose steps DeepSpeed makes. Raises ConfigError when the package is absent."""

    def _build(self, process: Process) -> None:
        config, device = self.config, self.device
        self.updates = 0
        """Steps that were not skipped."""
        self.settings = deepspeed_settings(config, read_deepspeed_file(config))
        self._ranks = config.parallel.data_parallel
        self._pipeline = config.parallel.pipeline_stage > 1
        self._deepspeed = open_deepspeed(config, device, process)
        self.versions = {"deepspeed": self._deepspeed.__version__}
        layout = config.whole
        self._model = build_parts(layout, device, self.world)[0]
        self.parameters = dict(self._model.named_parameters())
        self._predicted: Tensor | None = None
        """Predictions of a micro batch that count, on average over a step; None if all do."""
        self._waiting: deque[Tensor] = deque()
        """Ids of the next micro batches of a pipeline, if their documents are kept apart."""
        state = ZeroState if config.parallel.zero_stage else WholeState
        self._state: DeepSpeedState = state(self.parameters, layout, self.world)
        self.tensors = self._state.tensors
        self.pieces, self._gradient_sync = self._state.pieces, self._state.sync
        mark_split(self._model, layout, self.world)
        loss_sum = compile_model([self._model], config) if is_compiled(config, device) else self._model.loss_sum
        self._module = (
            build_pipeline(self._deepspeed, self._model, self.world, self._mean)
            if self._pipeline
            else LossModule(self._model, lambda ids, targets: self._mean(loss_sum(ids, targets), targets))
        )
        if self._pipeline and config.packing is not None and config.packing.separates:
            give_tokens(self._model, self._waiting)

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        """Ignore ``limits``, which the config's checks refuse: DeepSpeed tells the norm too late."""
        return [self._train_step(next(batches)) for _ in range(steps)]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """All ranks go through equally many batches, as ZeRO-3 and pipelines need; those who run
        out add some that do not count.
        """
        self._engine.eval()
        config = self.config
        # so many at once keep a pipeline busy
        width = 4 * config.parallel.pipeline_stage if self._pipeline else 1
        blank = np.zeros((config.validation.micro_batch_size, config.model.seq_length + 1), np.int32)
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
                packing = config.packing
                tokens += predicted if packing is None else packing.counted(batch)
        total, all_tokens = self.world.sum(total, tokens) if self.world.has_loss else self.world.sum(0.0, 0.0)
        return total, int(all_tokens)

    def _on_host(self, owned: dict[str, TensorSlice]) -> tuple[Tensors, Tensors, int]:
        moments = self._state.moments(owned) if self.updates else {}
        return self._state.weights(owned), moments, self.updates

    def identity(self) -> dict[str, Any]:
        return {"DeepSpeed's settings": self.settings}

    def _optimizer_kernel(self) -> str:
        outer = self._engine.optimizer
        inner, name = getattr(outer, "optimizer", None), type(outer).__name__
        return name if inner is None else f"{type(inner).__name__} within {name}"

    def _fill_weights(self, reader: Checkpoint | None) -> None:
        """Give DeepSpeed the filled parameters, which it may cut up, and the float32 copies."""
        self._state.fill(reader)
        tensors, settings = self._state.tensors, self.config.optimizer
        optimizer: dict[str, Any] = (
            {"model_parameters": parameter_groups(tensors, settings)}
            if "optimizer" in self.settings  # DeepSpeed's own kernels
            else {"optimizer": build_optimizer(tensors, settings, fused=self.device.fused_optimizer)}
        )
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints
            if self.world.topology.tensor > 1 and not self._pipeline:  # the groups of a run without a pipeline
                module = importlib.import_module("deepspeed.runtime.pipe.topology")
                optimizer["mpu"] = module.PipelineParallelGrid(topology=ranks_of(self.world.topology))
            self._engine, *_ = self._deepspeed.initialize(model=self._module, config=self.settings, **optimizer)
        self._state.attach(self._engine, reader)
        self.optimizer = self._state.basic_optimizer
        if self.config.parallel.zero_stage == 3:  # the loss reads it outside its own module
            self._deepspeed.zero.register_external_parameter(self._module, self._model.wte.weight)

    def _fill_moments(self, reader: Checkpoint, optimizer_steps: int) -> None:
        moments = reader.moments(self.config, optimizer_steps, self.pieces)
        first = next(moments, None)
        if first is not None:
            # DeepSpeed has no place for moments before the first step: make one that changes no weight
            train = self.config.train
            shape = (train.micro_batch_size * train.accumulation_steps, self.config.model.seq_length + 1)
            self._update(np.zeros(shape, np.int32), rate=0.0, scale=1.0)
            self._state.fill_moments(itertools.chain([first], moments), optimizer_steps)
            self.updates = max(optimizer_steps, 1)

    def _train_step(self, batch: Batch) -> StepResult:
        self.step += 1
        scale, rate = self.loss_scale.value, self.schedule.rate()
        loss, norm = self._update(batch.tokens, rate, scale)
        # -1 is how some of DeepSpeed's optimizers say that it is not
        finite = math.isfinite(norm) and norm >= 0
        if finite:
            self.updates += 1
            self.schedule.advance(batch.samples)
        self.loss_scale.update(finite)
        return StepResult(
            loss=loss, grad_norm=norm if finite else math.inf, learning_rate=rate, loss_scale=scale, skipped=not finite
        )

    def _update(self, tokens: Tokens, rate: float, scale: float) -> tuple[float, float]:
        """Return the loss of one step and its norm before clipping. DeepSpeed leaves the weights
        as they are where the norm is not finite.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        # DeepSpeed averages over ranks, the native engine sums: so a micro batch overflows at the
        # same scale on any number of ranks
        self._state.begin_step(scale / self._ranks)
        self._engine.train()
        micro = self.config.train.micro_batch_size
        pieces = [tokens[start : start + micro] for start in range(0, len(tokens), micro)]
        predicted, pairs = self.predicted(tokens), self._pairs(pieces)
        if isinstance(predicted, Tensor):
            self._predicted = predicted / (len(pieces) * self._ranks)
        if self._pipeline:
            with contextlib.redirect_stdout(io.StringIO()):  # the report has this line
                loss = self._engine.train_batch(pairs)
            return loss.item(), self._state.norm()
        at = self.device.torch_device
        total = torch.zeros((), dtype=wide_type(at), device=at)
        for pair in pairs:
            mean = self._engine(*pair)
            self._engine.backward(mean)
            self._engine.step()
            total += mean.detach()
        return self.world.sum(total.item())[0] / (len(pieces) * self.world.size), self._state.norm()

    def _mean_losses(self, batches: list[Tokens]) -> list[float]:
        """Return the mean loss of each batch; nothing on a pipeline's stages before the last."""
        self._predicted, pairs = None, self._pairs(batches)
        if not self._pipeline:
            return [self._engine(*pair).item() for pair in pairs]
        losses = self._engine.eval_batch(
            pairs, reduce_output=None, compute_loss=True, bcast_loss=False, num_micro_batches=len(batches)
        )
        return [] if losses is None else [loss.item() for loss in losses]

    def _pairs(self, pieces: list[Tokens]) -> Iterator[tuple[Tensor, Tensor]]:
        """Return ids and targets of micro batches, of which each stage of a pipeline sees all."""
        packing = self.config.packing
        if self._pipeline and packing is not None and packing.separates:
            self._waiting.clear()
            self._waiting.extend(inputs_and_targets(piece, self.device)[0] for piece in pieces)
        return (inputs_and_targets(piece, self.device, packing) for piece in pieces)

    def _mean(self, loss_sum: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a micro batch, whose gradient is scaled."""
        predicted = targets.numel() if self._predicted is None else self._predicted
        return self._state.scaled(loss_sum / predicted)


def open_deepspeed(config: Run, device: TorchDevice, process: Process) -> Any:
    """Import the package, and tell it the device and the processes."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"engine=deepspeed: the package is not installed; {install('deepspeed')}, or set engine=native"
        )
    os.environ["DS_ACCELERATOR"] = device.kind
    deepspeed = importlib.import_module("deepspeed")
    if not config.deepspeed.build_kernels:
        leave_out_shared_memory(deepspeed)
    forget_groups(deepspeed)
    if device.kind == "cpu":
        allow_float16(deepspeed)
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


def ranks_of(topology: Topology) -> Any:
    """Return the three axes as DeepSpeed's topology, which numbers the ranks as Topology does."""
    module = importlib.import_module("deepspeed.runtime.pipe.topology")
    return module.PipeModelDataParallelTopology(num_pp=topology.pipeline, num_mp=topology.tensor, num_dp=topology.data)


def mark_split(stage: GPT2, config: Run, world: World) -> None:
    """Tell DeepSpeed which parameters are split over the tensor-parallel ranks.

    Its norm counts the others only on the first of these ranks. With sequence parallelism, also sum
    the parts of their gradients, which DeepSpeed does not do.
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.to(DTYPES[config.precision.reduction], copy=True)
        sum_over(world.groups[GroupKind.TENSOR], [total])
        return total.to(gradient.dtype)

    for name, parameter in stage.named_parameters():
        replicated = role_of(name) is Role.REPLICATED
        parameter.tensor_model_parallel = not replicated  # type: ignore[attr-defined]
        if replicated and config.parallel.sequence_parallel:
            parameter.register_hook(summed)  # type: ignore[no-untyped-call]


def build_pipeline(deepspeed: Any, stage: GPT2, world: World, mean: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return DeepSpeed's PipelineModule, in which each native stage is one layer.

    The first and the last stage each hold the token table, whose gradients DeepSpeed adds up.
    mean: function of a micro batch's summed loss and its targets.
    """
    topology, place = world.topology, world.at.pipeline

    def mean_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return mean(stage.loss_of(hidden, targets), targets)

    with contextlib.redirect_stdout(io.StringIO()):
        pipeline = deepspeed.pipe.PipelineModule(
            layers=[stage if place == at else nn.Identity() for at in range(topology.pipeline)],
            topology=ranks_of(topology),
            loss_fn=mean_loss,
            partition_method="uniform",
            dynamic_shape=True,  # validation may have other shapes
        )
    if place in topology.embedding_places:
        stage.wte.weight.ds_pipe_replicated = place > 0  # type: ignore[attr-defined]
        pipeline.tied_modules["wte"] = stage.wte
        pipeline.tied_comms["wte"] = {
            "ranks": list(topology.group(GroupKind.EMBEDDING, world.rank)),
            "group": world.groups[GroupKind.EMBEDDING],
            "weight_attr": ["weight"],
            "module": stage.wte,
        }

        def tied() -> list[tuple[Any, Any]]:
            # DeepSpeed 0.19 sums ``grad`` over the two stages. By then ZeRO-1 with float16 has moved the gradient to
            # ``grad_accum``, so nothing would be summed.
            moved: Tensor | None = getattr(stage.wte.weight, "grad_accum", None)
            weight = stage.wte.weight if moved is None else SimpleNamespace(grad=moved)
            return [(weight, world.groups[GroupKind.EMBEDDING])]

        pipeline.get_tied_weights_and_groups = tied
    return pipeline


def give_tokens(stage: GPT2, waiting: deque[Tensor]) -> None:
    """Give the stage the ids of each micro batch beside its input.

    DeepSpeed sends a stage hidden states only. But every stage reads the batch, and all
    schedules go forward in the order of the micro batches. waiting: their ids, in this order.
    """

    def add(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return inputs, {**named, "tokens": waiting.popleft()}

    stage.register_forward_pre_hook(add, with_kwargs=True)

"""Forward, backward, accumulate, clip, step: one device, or one of several that sum their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.checkpoint.snapshot import TrainState, owned_pieces
from common.cluster.environment import Process
from common.dataset.sampler import Batch, Tokens
from common.parallel.run import Packing
from common.parallel.sharding import initial_values, slices_of_rank
from common.quantization import frozen_parameters
from common.tensor_files.safetensors_file import Tensors
from common.training.engine import NO_LIMITS, Limits, StepResult
from common.training.opened_checkpoint import Checkpoint
from common.training.start import Start
from common.weights.pieces import TensorSlice
from torch_gpt2.base_engine import BaseEngine
from torch_gpt2.checkpoint import Staging, copy_at_once, fill_moments, fill_weights, moments_on_host, weights_on_host
from torch_gpt2.compilation import compile_model, is_compiled
from torch_gpt2.data import inputs_and_targets, split, to_device
from torch_gpt2.device import DTYPES, TorchDevice
from torch_gpt2.model import GPT2, round_linear_layers
from torch_gpt2.optimizer import (
    DeviceLossScale,
    DeviceStep,
    MasterWeights,
    build_optimizer,
    clip_factor,
    global_norm,
    scale_gradients,
    takes_adam_kernel,
)
from torch_gpt2.parallel.data_parallel import LossSum
from torch_gpt2.parallel.layout import GradientSync, build_parts
from torch_gpt2.parallel.pipeline_parallel import Pipeline
from torch_gpt2.parallel.replica_strategies import replicate
from torch_gpt2.parallel.world import World
from torch_gpt2.quantize import Quantization, convert_linear_layers


class Engine(BaseEngine):
    """The native engine: the model's layout and torch's own optimizers.

    Loss, norm, loss scale and the choice to skip are tensors of the device. On an accelerator the
    results of a step are read when the next one has been started; on a CPU at once.
    """

    def _build(self, process: Process) -> None:
        config, device = self.config, self.device
        self.parts = build_parts(config, device, self.world)
        self.model = self.parts[0]
        if config.rounds_weights_once:
            for part in self.parts:
                round_linear_layers(part)
        self.quantization = Quantization(config, self.parts, self.world) if config.quantization else None
        for part in self.parts:
            convert_linear_layers(part, config)
        self.parameters = {name: parameter for part in self.parts for name, parameter in part.named_parameters()}
        reduction = "float32" if config.rounds_weights_once else config.precision.reduction
        self.master = MasterWeights(self.parameters, DTYPES[reduction])
        self.tensors = self.master.tensors
        self._frozen = frozen_parameters(config)
        self.optimizer = build_optimizer(
            self.master.tensors, config.optimizer, fused=device.fused_optimizer, frozen=self._frozen
        )
        # replicas stay equal only if all round alike
        self.adam_kernel = takes_adam_kernel(config.optimizer) and (
            self.world.sum(float(device.adam_kernel))[0] == self.world.size
        )
        self._step_on_device = DeviceStep(self.optimizer, config.optimizer, adam_kernel=self.adam_kernel)
        self._device_scale = DeviceLossScale(config.loss_scale, device.torch_device)
        """The scale of the next step; ``loss_scale`` is that after the last result."""
        self._under_way: Callable[[], StepResult] | None = None
        """Function that waits for the result of the last step, if that is not known."""
        self._began: Any = None
        """Moment at which an accelerator began the step under way."""
        self._copy = Staging().copy if device.runs_ahead else copy_at_once
        self._loss_sum = compile_model(self.parts, config) if is_compiled(config, device) else self.model.loss_sum
        self._data_parallel = replicate(self.parts, self._loss_sum, config, self.world, device, self.master.tensors)
        self._gradient_sync = GradientSync(config, self.world)
        self.pieces = slices_of_rank(config, self.world.topology, self.world.at, self.parameters)
        is_piped = self.world.topology.pipeline > 1
        self._pipeline = Pipeline(self.parts, config, self.world, device) if is_piped else None

    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        results = []
        for _ in range(steps):
            results += self._train_step(next(batches), limits)
        return results if self.device.runs_ahead else results + self.finish()

    def finish(self) -> list[StepResult]:
        result, self._under_way = self._under_way, None
        return [] if result is None else [result()]

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch in pinned memory, as ``to_device`` needs it for an accelerator."""
        if not self.device.runs_ahead:
            return batch
        tokens = torch.from_numpy(np.require(batch.tokens, np.int32, ["C", "W"]))
        return replace(batch, tokens=self.device.pin(tokens).numpy())

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        loss_sum = self._pipeline.evaluate if self._pipeline is not None else self._loss_sum
        return sum_losses(
            self.parts,
            loss_sum,
            batches,
            self.device,
            self.world,
            rows=self.config.validation.micro_batch_size,
            packing=self.config.packing,
        )

    def _on_host(self, owned: dict[str, TensorSlice]) -> tuple[Tensors, Tensors, int]:
        parts, tensors = self.config.optimizer.state_parts, self.master.tensors
        moments, steps = moments_on_host(tensors, self.optimizer, parts, owned, self._copy)
        return weights_on_host(tensors, owned, self._copy), moments, steps

    def _optimizer_kernel(self) -> str:
        name = type(self.optimizer).__name__
        if self.optimizer.defaults.get("fused"):
            return f"fused {name}"
        if self.adam_kernel:
            return f"{name} by a kernel per tensor (aclnnApplyAdamWV2)"
        return f"{name} over lists of tensors" if self.device.runs_ahead else name

    def begin(self, start: Start) -> TrainState:
        state = super().begin(start)
        self._device_scale.write(self.loss_scale)
        return state

    def _fill_weights(self, reader: Checkpoint | None) -> None:
        config, pieces = self.config, self.pieces
        values = reader.weights(config.model, pieces) if reader else initial_values(config, pieces)
        fill_weights(self.master.tensors, values)
        self.master.write_back()

    def _fill_moments(self, reader: Checkpoint, optimizer_steps: int) -> None:
        fill_moments(
            self.master.tensors,
            self.optimizer,
            reader.moments(self.config, optimizer_steps, self.pieces),
            optimizer_steps if self.config.optimizer.rule.counts_updates else None,
        )

    def _train_step(self, batch: Batch, limits: Limits) -> list[StepResult]:
        """Start a step, and return the result of the one before if that was not known.

        The rate of an update follows from whether the update before was made. The host reads this
        when the device has the gradients of this step to compute, so that neither waits long.
        """
        self.step += 1
        if self.device.runs_ahead and self._under_way is None:
            self._began = self.device.moment()
        tokens = batch.tokens
        scale = self._device_scale.value
        self.optimizer.zero_grad(set_to_none=True)
        if self.quantization is not None:
            self.quantization.begin_step(tokens, self.evaluate)
        for part in self.parts:
            part.train()
        recorder = self.recorder if self.recorder and self.recorder.step == self.step else None
        if recorder is not None:
            recorder.begin(tokens, self.parts, scale.item())
        loss = self._accumulate_gradients(tokens, scale)
        gradients = self.master.take_gradients()
        for name in self._frozen & gradients.keys():
            gradients[name].zero_()
        self._data_parallel.sum_gradients(list(gradients.values()))
        self._gradient_sync.complete(gradients)
        if recorder is not None:
            owned = owned_pieces(self.pieces, self._gradient_sync.owns, self.config.model)
            recorder.end(loss, self.master.tensors, gradients, owned)
        if self._gradient_sync.alone:
            norm = self._data_parallel.norm(global_norm(list(gradients.values()))) / scale
        else:
            norm = self._gradient_sync.norm(gradients) / scale
        finite = (norm < math.inf) & (loss.abs() < math.inf)
        applied = finite & (loss <= limits.loss) & (norm <= limits.grad_norm)
        results = self.finish()
        rate = self.schedule.rate()
        factor = clip_factor(norm, self.config.optimizer.clip_grad) / scale
        self._update(list(gradients.values()), applied, factor, rate)
        self._device_scale.update(finite)
        began, self._began = self._began, self.device.moment() if self.device.runs_ahead else None
        ended = self._began
        numbers = self.device.to_host(torch.stack([loss, norm, applied.to(norm.dtype)]))
        self._under_way = lambda: self._result(
            numbers().tolist(), rate, batch.samples, began and began.elapsed_time(ended) / 1000
        )
        return results

    def _update(self, gradients: list[Tensor], applied: Tensor, factor: Tensor, rate: float) -> None:
        """Take a step with the gradients times ``factor`` where ``applied``, both scalars."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.device.runs_ahead:
            self._data_parallel.update(lambda: self._step_on_device(applied, factor))
        elif applied:
            scale_gradients(gradients, factor.item())
            self._data_parallel.update(self.optimizer.step)
        else:
            return
        self.master.write_back()
        if self.quantization is not None and applied:  # which waits
            self.quantization.end_step()

    def _result(self, numbers: list[float], rate: float, samples: int, seconds: float | None) -> StepResult:
        """Return the result of a step, and move schedule and loss scale as the device has done."""
        loss, norm, applied = numbers
        if applied:
            self.schedule.advance(samples)
        scale = self.loss_scale.value
        self.loss_scale.update(math.isfinite(norm) and math.isfinite(loss))
        return StepResult(
            loss=loss, grad_norm=norm, learning_rate=rate, loss_scale=scale, skipped=not applied, seconds=seconds
        )

    def _accumulate_gradients(self, tokens: Tokens, scale: Tensor) -> Tensor:
        """Return the mean loss of the global batch, of ``wide_type``. Its gradient, times
        ``scale``, is left in the parameters.
        """
        micro, packing = self.config.train.micro_batch_size, self.config.packing
        watch = self.recorder.watch if self.recorder is not None else lambda _: None
        batch = to_device(tokens, self.device)
        predicted = self.predicted(tokens)
        if self._pipeline is not None:
            ids, targets = split(batch, packing)
            factor = (scale / predicted).float()
            with self._data_parallel.micro_batch(last=True):
                total = self._pipeline.step(ids, targets, lambda loss: loss * factor, watch)
            total = total / scale.float()
        else:
            total = torch.zeros((), device=self.device.torch_device)
            factor = scale.float()
            starts = range(0, len(batch), micro)
            for start in starts:
                ids, targets = split(batch[start : start + micro], packing)
                watch(start // micro)
                with self._data_parallel.micro_batch(last=start == starts[-1]):
                    loss = self._data_parallel.loss_sum(ids, targets) / predicted
                    (loss * factor).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return self.world.total(total if self.world.has_loss else torch.zeros_like(total))


@torch.no_grad()
def sum_losses(
    parts: Sequence[GPT2],
    loss_sum: LossSum,
    batches: Iterable[Tokens],
    device: TorchDevice,
    world: World,
    *,
    rows: int | None = None,
    packing: Packing | None = None,
) -> tuple[float, int]:
    """Return the sum of the losses over all predicted tokens of all ranks, and their number.

    rows: those of a full batch, if a graph of the model is made for it. packing: the model's, which may leave out
    tokens.
    """
    for part in parts:
        part.eval()
    total, tokens = 0.0, 0
    before: Callable[[], Any] = float  # the loss of the batch before, read while one runs
    for batch in batches:
        # a rank without a batch goes through the model for the ranks that need its part
        windows = batch if len(batch) else np.zeros((1, batch.shape[1]), np.int32)
        ids, targets = inputs_and_targets(windows, device, packing)
        # other batches, such as the last one of a validation, run operator by operator
        with nullcontext() if rows in (None, len(windows)) else torch.compiler.set_stance("force_eager"):
            loss = device.to_host(loss_sum(ids, targets))
        total += float(before())
        before = loss if len(batch) else float
        tokens += batch[:, 1:].size if packing is None else packing.counted(batch)
    total += float(before())
    total, all_tokens = world.sum(total, tokens) if world.has_loss else world.sum(0.0, 0.0)
    return total, int(all_tokens)

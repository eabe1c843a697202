"""Forward, backward, accumulate, clip, step: one device, or one of several that share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import mindspore as ms
from mindspore import Tensor, ops

from common.dataset.sampler import Tokens
from common.parallel.run import Packing
from common.parallel.sharding import owns, slices_of_rank
from common.quantization import frozen_parameters
from mindformers_gpt2.base_engine import BaseEngine, QueuedStep
from mindformers_gpt2.data import inputs_and_targets
from mindformers_gpt2.optimizer import (
    DeviceLossScale,
    LossGradients,
    MasterWeights,
    Optimizer,
    add_gradients,
    varies,
)
from mindformers_gpt2.parallel.layout import GradientSync, build_parts, own_dropout_keys
from mindformers_gpt2.parallel.pipeline_parallel import Pipeline
from mindformers_gpt2.parallel.world import World
from mindformers_gpt2.quantize import Quantization


class Engine(BaseEngine):
    """A step is two graphs, gradients of a micro batch and update, which do not wait for the host.

    Only a pipeline waits, for the messages between its stages.
    """

    def _build(self) -> None:
        config, device = self.config, self.device
        [self.model] = build_parts(config, device, self.world)
        self.loss_scale = DeviceLossScale(config.loss_scale)
        parameters = {parameter.name: parameter for parameter in self.model.get_parameters()}
        self.quantization = Quantization(config, self.model, self.world) if config.quantization else None
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._gradient_sync = GradientSync(config, self.world, shapes) if self.world.size > 1 else None
        replicas = self._gradient_sync.data_parallel if self._gradient_sync is not None else None
        self.master = MasterWeights(parameters, replicas if replicas is not None and replicas.splits else None)
        self._frozen = frozen_parameters(config)
        self.optimizer = Optimizer(
            self.master,
            config.optimizer,
            self.loss_scale,
            self._gradient_sync,
            frozen=self._frozen,
            rates=self.steps_per_run,
        )
        topology = self.world.topology
        self.pieces = slices_of_rank(config, topology, self.world.at, parameters)
        self.is_sharded = topology.tensor > 1 or topology.pipeline > 1 or self.master.shares is not None
        self.owns = partial(owns, config.parallel, topology, self.world.at)
        self._has_met = False
        model = config.model
        self._drops = any((model.embedding_dropout, model.attention_dropout, model.hidden_dropout))
        self._pipeline: Pipeline | None = None
        if topology.pipeline > 1:
            self._pipeline = Pipeline(self.model, config, self.world, device, self.loss_scale)
            self._loss_sum, self._loss_gradients = self._pipeline.evaluate, self._pipeline.loss_gradients
        else:
            self._loss_sum = device.compile(self.model.loss_sum)
            self._loss_gradients = LossGradients(self.model, config, self.loss_scale)
            self._gradients = device.compile(self._loss_gradients)
        self._add = device.compile(add_gradients)
        self._update = device.compile(self.optimizer)

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        return sum_losses(self._loss_sum, batches, self.world, packing=self.config.packing)

    def _train_step(self, tokens: Tokens, limits: Tensor) -> QueuedStep:
        self.step += 1
        if self.quantization is not None:
            self.quantization.begin_step(tokens, self.evaluate)
        recorder = self.recorder if self.recorder and self.recorder.step == self.step else None
        if recorder is not None:
            recorder.begin(tokens, [self.model], self.loss_scale.read().value)
        loss, *gradients = self._accumulate_gradients(tokens)
        if self._frozen:
            gradients = [
                ops.zeros_like(gradient) if name in self._frozen else gradient
                for name, gradient in zip(self.master.tensors, gradients, strict=True)
            ]
        if not self._has_met:
            self.world.meet()  # after compiling
            self._has_met = True
        if recorder is not None:
            whole, summed = loss, tuple(gradients)  # those that the update will find
            if self._gradient_sync is not None:
                whole, _, summed = self._gradient_sync(loss, summed)
            named = dict(zip(self.master.tensors, summed, strict=True))
            recorder.end(whole, self.master.tensors, named, self.owned_pieces())
        result: QueuedStep = self._update(limits, loss, *gradients)
        if self.quantization is not None and bool(result[2].asnumpy()):
            self.quantization.end_step()
        return result

    def _accumulate_gradients(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """This rank's part of the mean loss of the global batch, and of its gradients times the loss scale."""
        micro, packing = self.config.train.micro_batch_size, self.config.packing
        batch = [
            inputs_and_targets(tokens[start : start + micro], packing) for start in range(0, tokens.shape[0], micro)
        ]
        self._set_predicted(tokens)

        def keys(number: int) -> tuple[Tensor, ...]:
            """Return the dropout keys of a micro batch of this rank."""
            if not self._drops:
                return ()
            return (Tensor(own_dropout_keys(self.config, self.world, self.step, number, len(batch))),)

        watch = self.recorder.watch if self.recorder is not None else lambda _: None
        if self._pipeline is not None:
            return self._pipeline.step(batch, keys, watch)
        summed: tuple[Tensor, ...] | None = None
        for number, (ids, targets) in enumerate(batch):
            watch(number)
            found = self._gradients(ids, targets, *keys(number))
            summed = found if summed is None else self._add(*summed, *found)
        assert summed is not None
        return summed

    def _set_predicted(self, tokens: Tokens) -> None:
        """Divide by the tokens of the global batch whose losses count, where steps differ in them.

        tokens: of this rank.
        """
        config, topology = self.config, self.world.topology
        if not varies(config):
            return
        if config.packing is not None and config.packing.masks_loss:
            [total] = self.world.sum(config.packing.counted(tokens))
            total /= topology.tensor * topology.pipeline  # ranks with the same tokens
        else:
            total = len(tokens) * topology.data * config.model.seq_length
        if self._loss_gradients is not None:
            ops.assign(self._loss_gradients.predicted, Tensor(max(1.0, total), ms.float32))


def sum_losses(
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Tokens],
    world: World,
    packing: Packing | None = None,
) -> tuple[float, int]:
    """Return the sum of the losses over all predicted tokens of all ranks, and their number.

    packing: the model's, which may leave out tokens.
    """
    total, tokens = 0.0, 0
    for batch in batches:
        if not len(batch):  # nor have the ranks that need this one's part of the model
            continue
        ids, targets = inputs_and_targets(batch, packing)
        total += float(loss_sum(ids, targets).asnumpy())
        tokens += targets.size if packing is None else packing.counted(batch)
    total, all_tokens = world.sum(total, tokens) if world.has_loss else world.sum(0.0, 0.0)
    return total, int(all_tokens)

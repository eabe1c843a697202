"""The engine of several Ascends whose work MindSpore's compiler splits: one graph a step. Not run on an Ascend."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from common.dataset.sampler import Tokens
from common.errors import RunError
from common.log import LOG
from common.parallel.operator_plan import held_slice, owns, splits_vocabulary
from common.parallel.sharding import padded_shapes
from common.parallel.topology import GroupKind
from common.resolve.vendor_settings import semi_auto_settings
from mindformers_gpt2.base_engine import BaseEngine, QueuedStep
from mindformers_gpt2.data import inputs_and_targets
from mindformers_gpt2.parallel.collectives import all_reduce
from mindformers_gpt2.semi_auto.network import TrainingGraph, TrainingStep, build_network


class SemiAutoEngine(BaseEngine):
    """One rank of several. Made within the world, before anything else of the model.

    Every rank reads the whole batch unless ``parallel.full_batch`` is false. After the graph is compiled each parameter
    is this rank's part. It is filled, written to checkpoints and read from them as such, in the project's own format.
    """

    def _build(self) -> None:
        """Compile the step, which takes minutes for a large model.

        Raises RunError where the compiler's parts are not the plan's.
        """
        config, device, world = self.config, self.device, self.world
        settings = semi_auto_settings(config, world.rank)
        Path(settings["strategy_ckpt_config"]["save_file"]).parent.mkdir(parents=True, exist_ok=True)
        ms.set_auto_parallel_context(**settings)
        if config.parallel.vocab_emb_dp and splits_vocabulary(config) and world.rank == 0:
            LOG.warning(
                "parallel.vocab_emb_dp=true has no effect with a pipeline: tensor-parallel ranks"
                " split the embedding table"
            )
        network = build_network(config, device)
        self._step = TrainingStep(network, config, world.rank)
        self._evaluation, self._embedding = Evaluation(network), network.wte.weight
        self.master, self.optimizer, self.loss_scale = (self._step.master, self._step.optimizer, self._step.loss_scale)
        micro, accumulation = config.train.micro_batch_size, config.train.accumulation_steps
        self._rows = micro * (1 if config.parallel.full_batch is False else world.topology.data)
        no_tokens = np.zeros((self._rows * accumulation, config.model.seq_length + 1), np.int32)
        self._step.compile(*inputs_and_targets(no_tokens))
        self.is_sharded, self.owns = True, partial(owns, config=config, at=world.at)
        self.pieces = {name: held_slice(name, config, world.at) for name in self.master.tensors}
        for name, tensor in self.master.tensors.items():
            if tuple(tensor.shape) != (planned := tuple(end - first for first, end in self.pieces[name])):
                raise RunError(
                    f"rank {world.rank}: MindSpore's compiler holds {tuple(tensor.shape)} of {name}"
                    f" {padded_shapes(config)[name]}, the plan says {planned}; set"
                    " parallel.parallel_mode=1, since for other splits there are no checkpoints"
                )

    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """Every rank reads the same windows. Too few for a batch are filled up with copies of one,
        which are then taken out again.
        """
        self._share_embedding()
        total, tokens, rows = 0.0, 0, self._rows
        for batch in batches:
            for start in range(0, len(batch), rows):
                part = batch[start : start + rows]
                missing = rows - len(part)
                total += self._total(np.concatenate([part, *[part[:1]] * missing]))
                if missing:
                    total -= self._total(np.concatenate([part[:1]] * rows)) * missing / rows
                tokens += part[:, 1:].size
        return total, tokens

    def _train_step(self, tokens: Tokens, limits: Tensor) -> QueuedStep:
        self.step += 1
        ops.assign(self._step.limits, limits)
        self._step.set_train()
        result: QueuedStep = self._step(*inputs_and_targets(tokens))
        return result

    def _share_embedding(self) -> None:
        """Give the first stage's table to the last: a training graph sends it along, one without a
        backward pass does not.
        """
        group = self.world.groups.get(GroupKind.EMBEDDING)
        if group is None:
            return
        first = self.world.topology.holds_embedding(self.world.rank)
        shared = all_reduce(group)(self._embedding * 1.0 if first else ops.zeros_like(self._embedding))
        if not first:
            ops.assign(self._embedding, shared)

    def _total(self, tokens: Tokens) -> float:
        self._evaluation.set_train(False)
        mean = float(self._evaluation(*inputs_and_targets(tokens)).asnumpy())
        # each rank gave the same rows
        copies = self.world.topology.data if self.config.parallel.full_batch is False else 1
        return mean * self.config.train.global_batch_size * self.config.model.seq_length / copies


class Evaluation(nn.Cell):
    """The forward pass; the last stage's result reaches all (pipeline_result_broadcast)."""

    def __init__(self, network: TrainingGraph) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.network(ids, targets)
        return loss

"""Apply a parallel layout to the model (``build_parts``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from common.parallel.kernels import loss_rows
from common.parallel.run import Run
from common.parallel.sharding import owns
from common.parallel.topology import GroupKind
from common.weights.names import EMBEDDING
from mindformers_gpt2.device import DTYPES, MindSporeDevice
from mindformers_gpt2.layers import dropout_keys
from mindformers_gpt2.model import GPT2, set_fused_attention, set_packing, set_recompute
from mindformers_gpt2.optimizer import squares
from mindformers_gpt2.parallel.collectives import all_reduce
from mindformers_gpt2.parallel.data_parallel import DataParallel
from mindformers_gpt2.parallel.pipeline_parallel import keep_stage
from mindformers_gpt2.parallel.tensor_parallel import split_model
from mindformers_gpt2.parallel.world import World


def build_parts(config: Run, device: MindSporeDevice, world: World) -> list[GPT2]:
    """Return this rank's part of the model, one stage, without weights.

    It is cut before it has memory, so that a rank never holds more than its own.
    """
    topology = world.topology
    with no_init_parameters():
        model = GPT2(config.model, config.precision, config.vocab_rows, native=device.native_kernels)
        if topology.pipeline > 1:
            keep_stage(model, world.at.pipeline, topology)
        if topology.tensor > 1:
            split_model(model, world.groups[GroupKind.TENSOR])
    set_packing(model, config)
    set_fused_attention(model, config, device)
    model.cross_entropy.rows_at_once = loss_rows(config, device.total_memory())
    model.init_parameters_data()
    for parameter in model.get_parameters():
        parameter.set_dtype(DTYPES[config.precision.parameters])
    set_recompute(model, config.train)
    return [model]


def own_dropout_keys(config: Run, world: World, step: int, number: int, accumulation: int) -> NDArray[np.uint32]:
    """Return the dropout keys of a micro batch, for the layers of this rank.

    accumulation: micro batches of a rank in this step.

    They equal those of one process for the same samples. Only keys of attention heads differ, since
    each tensor-parallel rank has its own heads.
    """
    at = world.at
    keys = dropout_keys(config, step, at.data * accumulation + number, at.tensor)
    layers = world.topology.layers_of(at.pipeline, config.model.num_layers)
    return np.concatenate([keys[:1], keys[1 + 3 * layers[0] : 4 + 3 * layers[-1]]])


class GradientSync(nn.Cell):
    """Gradient reductions of a step, with the loss and the global gradient norm."""

    def __init__(self, config: Run, world: World, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Create the reductions. shapes: of this rank's parameters."""
        super().__init__()
        assert world.everyone is not None
        self.data_parallel = DataParallel(config, world, list(shapes.values()))
        self.everyone = all_reduce(world.everyone)
        copies = world.groups.get(GroupKind.EMBEDDING)
        assert copies is None or next(iter(shapes)) == EMBEDDING
        self.between_copies = all_reduce(copies) if copies is not None else None
        self.owned = Tensor([owns(config.parallel, world.topology, world.at, name) for name in shapes])
        self.reshape, self.concat, self.sum = ops.Reshape(), ops.Concat(), ops.ReduceSum()
        self.has_loss = world.has_loss

    def construct(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Return the mean loss of the global batch, the global gradient norm, and this rank's gradients.

        The norm counts each element once. The gradients are those with which this rank updates.
        """
        summed = self.data_parallel(gradients)
        if self.between_copies is not None:
            summed = (self.between_copies(summed[0]), *summed[1:])
        each = self.concat(ops.HyperMap()(self._squares, summed))
        mine = loss if self.has_loss else ops.zeros_like(loss)
        both = self.concat(
            (self.reshape(mine, (1,)), self.reshape(self.sum(ops.select(self.owned, each, ops.zeros_like(each))), (1,)))
        )
        # MindSpore keeps the order of messages only if one depends on the other. The line above may be a constant.
        both = self.everyone(ops.depend(both, each))
        return both[0], ops.sqrt(both[1]), summed

    def _squares(self, gradient: Tensor) -> Tensor:
        return self.reshape(squares(gradient), (1,))

"""Apply a parallel layout to the model (``build_parts``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters
from numpy.typing import NDArray

from common.parallel.resolved_run import ResolvedRun
from common.parallel.sharding import owns
from common.parallel.topology import GroupKind
from common.weights.names import EMBEDDING
from mindformers_gpt2.device import DTYPES, MindSporeDevice
from mindformers_gpt2.layers import dropout_keys
from mindformers_gpt2.model import GPT2, set_recompute
from mindformers_gpt2.optimizer import squares
from mindformers_gpt2.parallel.collectives import all_reduce
from mindformers_gpt2.parallel.data_parallel import DataParallel
from mindformers_gpt2.parallel.pipeline_parallel import keep_stage
from mindformers_gpt2.parallel.tensor_parallel import split_model
from mindformers_gpt2.parallel.world import World


def build_parts(config: ResolvedRun, device: MindSporeDevice, world: World) -> list[GPT2]:
    """Return what this rank holds of the model, one stage, with weights not yet filled in.

    It is cut while it has no memory, so that a rank never holds more than its own.
    """
    topology = world.topology
    with no_init_parameters():
        model = GPT2(
            config.model, config.precision, config.vocab_rows, native=device.native_kernels
        )
        if topology.pipeline > 1:
            keep_stage(model, world.at.pipeline, topology)
        if topology.tensor > 1:
            split_model(model, world.groups[GroupKind.TENSOR])
    model.init_parameters_data()
    for parameter in model.get_parameters():
        parameter.set_dtype(DTYPES[config.precision.parameters])
    set_recompute(model, config.train)
    return [model]


def own_dropout_keys(
    config: ResolvedRun, world: World, step: int, number: int
) -> NDArray[np.uint32]:
    """Of a micro batch of this rank, for the layers that it holds: those of one process for the
    same samples, but for the heads, of which each tensor-parallel rank has others.
    """
    at, accumulation = world.at, config.train.accumulation_steps
    keys = dropout_keys(config, step, at.data * accumulation + number, at.tensor)
    layers = world.topology.layers_of(at.pipeline, config.model.num_layers)
    return np.concatenate([keys[:1], keys[1 + 3 * layers[0] : 4 + 3 * layers[-1]]])


class GradientSync(nn.Cell):
    """Gradient reductions of a step, with the loss and the global gradient norm."""

    def __init__(
        self,
        config: ResolvedRun,
        world: World,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        has_loss: bool,
    ) -> None:
        """shapes: of this rank's parameters. has_loss: whether its loss counts; others may have the
        same, or none.
        """
        super().__init__()
        self.owns = partial(owns, config.parallel, world.topology, world.at)
        """Whether this rank speaks for its part of a parameter; others may hold the same."""
        assert world.everyone is not None
        self.data_parallel = DataParallel(config, world, list(shapes.values()))
        self.everyone = all_reduce(world.everyone)
        copies = world.groups.get(GroupKind.EMBEDDING)
        assert copies is None or next(iter(shapes)) == EMBEDDING
        self.between_copies = all_reduce(copies) if copies is not None else None
        self.owned = Tensor([self.owns(name) for name in shapes])
        self.reshape, self.concat, self.sum = ops.Reshape(), ops.Concat(), ops.ReduceSum()
        self.has_loss = has_loss

    def construct(
        self, loss: Tensor, gradients: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """The mean loss of the global batch, the norm of the gradients of all ranks, each element
        counted once, and the gradients with which this rank updates.
        """
        summed = self.data_parallel(gradients)
        if self.between_copies is not None:
            summed = (self.between_copies(summed[0]), *summed[1:])
        each = self.concat(ops.HyperMap()(self._squares, summed))
        mine = loss if self.has_loss else ops.zeros_like(loss)
        both = self.concat(
            (
                self.reshape(mine, (1,)),
                self.reshape(self.sum(ops.select(self.owned, each, ops.zeros_like(each))), (1,)),
            )
        )
        # MindSpore keeps messages in order only where one needs the other, and the line above may
        # be a constant
        both = self.everyone(ops.depend(both, each))
        return both[0], ops.sqrt(both[1]), summed

    def _squares(self, gradient: Tensor) -> Tensor:
        return self.reshape(squares(gradient), (1,))

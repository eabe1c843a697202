"""Replicas of the model: gradients summed over them, and ZeRO stage 1.

With ZeRO the optimizer's state is split over the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SplitWithSize

from common.parallel.run import Run
from common.parallel.topology import GroupKind
from mindformers_gpt2.device import DTYPES
from mindformers_gpt2.parallel.collectives import AllGather, ReduceScatter, all_reduce
from mindformers_gpt2.parallel.world import World


class DataParallel(nn.Cell):
    """Sum of gradients over the replicas, in one message.

    They are not averaged: each micro batch is divided by the global batch. With ZeRO each rank
    updates its share of the rows of every parameter. Shares are equal, and zeros pad the last ones.
    """

    def __init__(self, config: Run, world: World, shapes: Sequence[tuple[int, ...]]) -> None:
        """Create the sum. shapes: of the gradients, in their order."""
        super().__init__()
        group = world.groups.get(GroupKind.DATA)
        self.splits = group is not None and config.parallel.zero_stage > 0
        self.ranks = world.topology.data if self.splits else 1
        self.combine = None if group is None else ReduceScatter(group) if self.splits else all_reduce(group)
        self.all_gather = AllGather(group) if group is not None and self.splits else None
        self.sum_dtype = DTYPES[config.precision.reduction]
        self.sizes = tuple(math.prod(self.share_of(shape)) for shape in shapes)
        # Use primitives and HyperMap. Loops and the functions of ops would take longer to compile
        # than the rest of the update.
        self.cast, self.reshape, self.concat, self.split = (ops.Cast(), ops.Reshape(), ops.Concat(1), SplitWithSize())

    def construct(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sums over the replicas, or this rank's shares of them."""
        if self.combine is None:
            return gradients
        summed = self.combine(self.concat(ops.HyperMap()(self._line, gradients)))
        shares: Sequence[Tensor] = ops.HyperMap()(self._share, self.split(summed, self.sizes, 1), gradients)
        return shares

    def whole(self, shares: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return whole parameters from the shares of all ranks. ``parameters`` give only their shapes."""
        assert self.all_gather is not None
        gathered = self.all_gather(self.concat(ops.HyperMap()(self._flat, shares)))
        whole: Sequence[Tensor] = ops.HyperMap()(self._join, self.split(gathered, self.sizes, 1), parameters)
        return whole

    def share_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a rank's share."""
        return (-(-shape[0] // self.ranks), *shape[1:])

    def _line(self, gradient: Tensor) -> Tensor:
        """Return (ranks, elements of a share), in the type in which it is summed."""
        missing = -gradient.shape[0] % self.ranks
        if missing:
            gradient = ops.concat((gradient, ops.zeros((missing, *gradient.shape[1:]), gradient.dtype)))
        return self.cast(self.reshape(gradient, (self.ranks, -1)), self.sum_dtype)

    def _share(self, line: Tensor, gradient: Tensor) -> Tensor:
        return self.cast(self.reshape(line, self.share_of(gradient.shape)), gradient.dtype)

    def _flat(self, share: Tensor) -> Tensor:
        return self.reshape(share, (1, -1))

    def _join(self, lines: Tensor, parameter: Tensor) -> Tensor:
        whole = self.reshape(lines, (-1, *parameter.shape[1:]))
        return whole if whole.shape[0] == parameter.shape[0] else whole[: parameter.shape[0]]

"""Communication between the ranks of a group: within compiled graphs, and on the host between them.

A CPU has only AllReduce in any group, as a sum of float32 or float16. All else is built from it. With ``native`` the
primitives of Ascend are used. They are written from MindSpore's documentation and have not been run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group
from mindspore.mint import distributed
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Group:
    """Group of ranks. name: its name in MindSpore. rank: index of this rank among the ``size`` members."""

    name: str
    rank: int
    size: int
    native: bool


def make_group(ranks: Sequence[int], rank: int, world_size: int, *, native: bool) -> Group:
    """Create a group of equally spaced ranks that includes this rank.

    Every member must call it, in the same order of groups.
    """
    if len(ranks) == world_size:
        name = GlobalComm.WORLD_COMM_GROUP
    else:
        name = f"gpt2_{ranks[0]}_{ranks[-1]}_{ranks[1] - ranks[0]}"
        create_group(name, list(ranks))
    return Group(name=name, rank=list(ranks).index(rank), size=len(ranks), native=native)


def all_reduce(group: Group) -> Any:
    """Return an operator that sums a tensor over the group, with the same bits on every rank."""
    return ops.AllReduce(ops.ReduceOp.SUM, group.name)


class AllGather(nn.Cell):
    """Gather (n, ...) of each rank into (size x n, ...), by rank."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.rank, self.size = group.rank, group.size
        self.native = ops.AllGather(group.name) if group.native else None
        self.all_reduce = all_reduce(group)

    def construct(self, x: Tensor) -> Tensor:
        if self.native is not None:
            return self.native(x)
        rows = x.shape[0]
        parts = [x]
        if self.rank > 0:
            parts = [ops.zeros((self.rank * rows, *x.shape[1:]), x.dtype), *parts]
        if self.rank < self.size - 1:
            parts = [*parts, ops.zeros(((self.size - 1 - self.rank) * rows, *x.shape[1:]), x.dtype)]
        return self.all_reduce(ops.concat(parts))


class ReduceScatter(nn.Cell):
    """Return this rank's (n, ...) of the sum of (size x n, ...) over the ranks."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.rank, self.size = group.rank, group.size
        self.native = ops.ReduceScatter(ops.ReduceOp.SUM, group.name) if group.native else None
        self.all_reduce = all_reduce(group)

    def construct(self, x: Tensor) -> Tensor:
        if self.native is not None:
            return self.native(x)
        rows = x.shape[0] // self.size
        return self.all_reduce(x)[self.rank * rows : (self.rank + 1) * rows]


def prepare_messages(world_size: int) -> None:
    """Prepare ``send`` and ``receive``. Call it once on every rank before the first of them.

    Otherwise, on a CPU, they look up a group with Ascend's name, or hang.
    """
    if GlobalComm.WORLD_COMM_GROUP != "hccl_world_group":
        create_group("hccl_world_group", list(range(world_size)))


def send(x: Tensor, rank: int) -> Any:
    """Send to a rank of the world without waiting.

    Returns a handle to wait for, or None if x has been copied.
    """
    return distributed.isend(x, rank, group=GlobalComm.WORLD_COMM_GROUP)


def receive(shape: tuple[int, ...], dtype: ms.Type, rank: int) -> Tensor:
    """Wait for the next message of a rank of the world."""
    x = ops.zeros(shape, dtype)
    distributed.recv(x, rank, group=GlobalComm.WORLD_COMM_GROUP)
    return x


def exchange(group: Group, data: bytes) -> list[bytes]:
    """Return the bytes of all ranks, by rank. Each byte travels as a float32 in a sum."""
    lengths = exchange_numbers(group, len(data))
    rows = np.zeros((group.size, max(lengths)), np.float32)
    rows[group.rank, : len(data)] = np.frombuffer(data, np.uint8)
    return [row[:size].astype(np.uint8).tobytes() for row, size in zip(_sum(group, rows), lengths, strict=True)]


def exchange_numbers(group: Group, number: int) -> list[int]:
    """Return the numbers of all ranks, by rank."""
    assert 0 <= number < 2**24, "float32 counts no further"
    numbers = np.zeros(group.size, np.float32)
    numbers[group.rank] = number
    return [int(found) for found in _sum(group, numbers)]


def _sum(group: Group, values: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = all_reduce(group)(Tensor(values)).asnumpy()
    return found

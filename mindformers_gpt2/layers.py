"""Layers that torch has built in, or for which MindSpore's own do not fit."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops.auto_generate import DropoutExt
from numpy.typing import NDArray

from common.parallel.run import Run


def empty(name: str, shape: tuple[int, ...]) -> Parameter:
    """Return float32 zeros, which take no memory yet within ``no_init_parameters``."""
    return Parameter(initializer("zeros", shape, ms.float32), name=name)


class Embedding(nn.Cell):
    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = empty("weight", (rows, size))
        self.gather = ops.Gather()

    def construct(self, ids: Tensor) -> Tensor:
        return self.gather(self.weight, ids, 0)


class Dropout(nn.Cell):
    """Zero a share ``rate`` of the input and divide the rest by 1 - rate.

    Which elements are dropped depends only on the key and the position. So a step that is resumed
    or recomputed drops the same ones, and no state is kept. native: whether the device has a kernel
    for that. Otherwise positions are hashed (multiply, xor, shift, like murmur's finalizer).
    """

    def __init__(self, rate: float, native: bool) -> None:
        super().__init__()
        self.rate = rate
        self.native = DropoutExt() if native else None
        self.shifts = Tensor(2**15, ms.uint32), Tensor(2**12, ms.uint32)
        self.factors = Tensor(0x2C1B3C6D, ms.uint32), Tensor(0x297A2D39, ms.uint32)
        self.dropped = Tensor(min(int(rate * 2**32), 2**32 - 1), ms.uint32)

    def construct(self, x: Tensor, key: Tensor) -> Tensor:
        """Apply the dropout. key: two uint32 from ``dropout_keys``; None drops nothing."""
        if key is None or self.rate == 0.0:
            return x
        if self.native is not None:
            return self.native(x, self.rate, ops.cast(key[0], ms.int64), ops.cast(key[1], ms.int64))[0]
        bits = ops.cast(ops.arange(x.size, dtype=ms.int32), ms.uint32) * key[1] + key[0]
        # graph mode does not support strict
        for shift, factor in zip(self.shifts, self.factors):  # noqa: B905
            bits = ops.bitwise_xor(bits, bits // shift) * factor
        kept = ops.cast(bits >= self.dropped, x.dtype) * (1.0 / (1.0 - self.rate))
        return x * kept.reshape(x.shape)


def dropout_keys(config: Run, step: int, micro_batch: int, tensor_rank: int = 0) -> NDArray[np.uint32]:
    """Return a key for each dropout of the model, (1 + 3 num_layers, 2).

    The order is the embedding, then attention, its output and the MLP's output of each block. micro_batch: its number
    in the global batch. tensor_rank: changes the keys of attention, since the heads are split.
    """
    places = 1 + 3 * config.model.num_layers

    def drawn(*more: int) -> NDArray[Any]:
        entropy = (config.seed, step, micro_batch, *more)
        return np.random.SeedSequence(entropy).generate_state(2 * places).reshape(places, 2)

    keys = drawn()
    if tensor_rank:
        keys[1::3] = drawn(tensor_rank)[1::3]
    keys[:, 1] |= 1  # an odd factor maps positions one to one
    return keys.astype(np.uint32)


class GELU(nn.Cell):
    """A GELU of ``model.activation``: the device's kernel, or its formula where that is slow or absent."""

    def __init__(self, kind: str, native: bool) -> None:
        super().__init__()
        kernels = {"gelu_new": ops.GeLU, "quick_gelu": ops.FastGeLU}
        self.kind, self.native = kind, kernels[kind]() if native and kind in kernels else None
        self.sigmoid, self.erf = ops.Sigmoid(), ops.Erf()

    def construct(self, x: Tensor) -> Tensor:
        if self.native is not None:
            return self.native(x)
        if self.kind == "gelu":
            return 0.5 * x * (1.0 + self.erf(math.sqrt(0.5) * x))
        if self.kind == "quick_gelu":
            return x * self.sigmoid(1.702 * x)
        return x * self.sigmoid(x * (_GELU * 0.044715 * (x * x) + _GELU))


_GELU = 2.0 * math.sqrt(2.0 / math.pi)

"""Float32 matrix products of a CPU by oneDNN, where that is exact and faster than MKL.

MKL has no AVX512 kernels on processors of other makers, where oneDNN is twice as fast. torch takes
oneDNN for float32 only where it may also round to bfloat16. oneDNN rounds on processors with matrix
units (AMX) and computes in float32 on others, so a probe decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from common.log import LOG
from torch_gpt2.device import TorchDevice
from torch_gpt2.parallel.world import World

_SIZES = ((8, 64), (96, 192), (256, 512))
"""Rows and width of the products that the probe checks; the last one is timed."""
_TRIES = 9
_GAIN = 1.3
"""Least gain to change for, well above what a busy machine adds to the faster of nine tries."""


def use_fastest_products(device: TorchDevice, world: World) -> None:
    """Let this process multiply float32 matrices by oneDNN if every rank finds it exact and faster.

    It is for training and evaluation: a product of one row, as in generation, is slower so.
    """
    if device.kind != "cpu":
        return
    gain = _gain() if torch.backends.mkldnn.is_available() else 0.0  # type: ignore[no-untyped-call]
    chosen = world.sum(float(gain >= _GAIN))[0] == world.size
    _set_onednn(chosen)
    library = "oneDNN" if chosen else "MKL"
    LOG.debug(f"float32 products by {library}; oneDNN is {gain:.2g} times as fast")


def _gain() -> float:
    """Return how many times as fast oneDNN is, 0 where it rounds."""
    try:
        _set_onednn(True)
        if not all(_is_exact(rows, width) for rows, width in _SIZES):
            return 0.0
        work = _work(*_SIZES[-1])
        seconds: dict[bool, float] = {}
        for at in range(2 * _TRIES):  # in turn
            onednn = at % 2 == 0
            _set_onednn(onednn)
            began = time.perf_counter()
            work()
            seconds[onednn] = min(seconds.get(onednn, 1e9), time.perf_counter() - began)
        return seconds[False] / seconds[True]
    finally:
        _set_onednn(False)


def _set_onednn(wanted: bool) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = (  # type: ignore[attr-defined]
        "bf16" if wanted else "none"
    )


def _is_exact(rows: int, width: int) -> bool:
    """Tell whether products with the identity return all bits of a matrix, in the forms of the
    forward pass and of both gradients.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, width, generator=generator) + 1.0
    weight, one = torch.eye(width), torch.eye(rows)
    found = (F.linear(x, weight), F.linear(x, weight, torch.zeros(width)), x @ weight, one.t() @ x)
    return all(torch.equal(product, x) for product in found)


def _work(rows: int, width: int) -> Callable[[], Tensor]:
    x, weight = torch.rand(rows, width), torch.rand(width, width)
    return lambda: F.linear(x, weight)

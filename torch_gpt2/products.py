"""Products of a CPU, and products and layer norms of few rows with weights that are converted once, for generation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from common.device import processor_name
from common.log import LOG
from torch_gpt2.device import TorchDevice
from torch_gpt2.model import LayerNorm
from torch_gpt2.parallel.world import World
from torch_gpt2.private_api import has_kernel, pack_weight, packed_linear

_SIZES = ((8, 64), (96, 192), (256, 512))
"""Rows and width of the products that the probe checks."""

Multiply = Callable[[Tensor], Tensor]
"""Product x (..., in) -> x W^T + b (..., out)."""


class Product:
    """Product x W^T + b with weights that are converted once. Several weights are stacked.

    On a CPU they are in oneDNN's own order. Without kernels for a type below float32, the rounded weights are held and
    multiplied in float32, and the result is rounded. Such a kernel does the same inside.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype) -> None:
        on_cpu = weights[0].device.type == "cpu"
        self.dtype = torch.float32 if on_cpu and not has_kernel(dtype) else dtype
        self.weight = joined(weights, dtype).to(self.dtype)  # (out, in)
        self.bias = joined(biases, dtype).to(self.dtype) if biases else None
        self._linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        if on_cpu and has_kernel(self.dtype):
            self.weight = pack_weight(self.weight)
            self._linear = packed_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x.to(self.dtype), self.weight, self.bias).to(x.dtype)


def prepared_norm(norm: LayerNorm) -> Multiply:
    """Return a layer norm with its weights converted once. It computes in their type, and returns that of x."""
    dtype, shape, epsilon = norm.norm_dtype, norm.weight.shape, norm.eps
    weight, bias = (part.detach().to(dtype) for part in (norm.weight, norm.bias))
    return lambda x: torch.layer_norm(x.to(dtype), shape, weight, bias, epsilon).to(x.dtype)


def joined(parts: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Stack parts along the first axis, in ``dtype`` if given. A single part of that type is not copied."""
    cast = [part.detach().to(dtype or part.dtype) for part in parts]
    return cast[0] if len(cast) == 1 else torch.cat(cast)


def use_fastest_products(device: TorchDevice, world: World) -> None:
    """Let this process multiply float32 matrices of a CPU by oneDNN, if every rank has a processor
    for it and finds it exact.

    MKL has no AVX512 kernels on processors of other makers than Intel, where oneDNN is twice as
    fast. torch takes oneDNN for float32 only where it may also round to bfloat16. oneDNN rounds on
    processors with matrix units (AMX) and computes in float32 on others, so a probe decides. No
    time is measured: a busy machine would choose otherwise, and a resumed run would differ in its
    last bits. It is for training and evaluation: a product of one row, as in generation, is slower.
    """
    if device.kind != "cpu":
        return
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512" and "Intel" not in processor_name()
    has_onednn = has_avx512 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    chosen = world.sum(float(has_onednn and _rounds_nothing()))[0] == world.size
    _set_onednn(chosen)
    LOG.debug(f"float32 products by {'oneDNN' if chosen else 'MKL'}")


def _rounds_nothing() -> bool:
    """Tell whether oneDNN computes in float32 where it may round: whether products with the identity return all bits of
    a matrix, in the forms of the forward pass and of both gradients.
    """
    try:
        _set_onednn(True)
        for rows, width in _SIZES:
            x = torch.rand(rows, width, generator=torch.Generator().manual_seed(0)) + 1.0
            weight, one = torch.eye(width), torch.eye(rows)
            found = (F.linear(x, weight), F.linear(x, weight, torch.zeros(width)), x @ weight, one.t() @ x)
            if not all(torch.equal(product, x) for product in found):
                return False
        return True
    finally:
        _set_onednn(False)


def _set_onednn(wanted: bool) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = (  # type: ignore[attr-defined]
        "bf16" if wanted else "none"
    )

"""Products of few rows against the same in float64."""

from __future__ import annotations

import pytest
import torch

from torch_gpt2 import products
from torch_gpt2.products import Product

IN, OUT = 96, (33, 64)


@pytest.mark.parametrize("cpu", ["as it is", "no oneDNN", "no narrow kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_equal_float64(
    cpu: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tolerance: float32's error of sums of 96 products; in bfloat16 the rounding of the result,
    2**-8 of the largest.
    """
    if cpu == "no oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    elif cpu == "no narrow kernels":
        monkeypatch.setattr(products, "has_kernel", lambda dtype: dtype == torch.float32)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights, biases = [draw(out, IN) / 10 for out in OUT], [draw(out) for out in OUT]
    x = draw(1, rows, IN)
    exact = x.double() @ torch.cat(weights).double().T
    unit = 2e-6 if dtype == torch.float32 else 2**-8
    for given in (biases, []):
        product = Product(weights, given, dtype)
        # native kernels of a narrow type take three times as long for a prompt
        assert cpu == "as it is" or product.weight.dtype == torch.float32
        found = product(x)
        expected = exact + torch.cat(given).double() if given else exact
        assert found.dtype == dtype and found.shape == expected.shape
        difference = (found.double() - expected).abs().max()
        assert difference <= unit * expected.abs().max()

"""Products of few rows against the same in float64."""

from __future__ import annotations

import pytest
import torch

from torch_gpt2.products import Product

IN, OUT = 96, (33, 64)


@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_equal_float64(
    has_onednn: bool, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tolerance: float32's error of sums of 96 products; in bfloat16 the rounding of the result,
    2**-8 of the largest.
    """
    if not has_onednn:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights, biases = [draw(out, IN) / 10 for out in OUT], [draw(out) for out in OUT]
    x = draw(1, rows, IN)
    exact = x.double() @ torch.cat(weights).double().T
    unit = 2e-6 if dtype == torch.float32 else 2**-8
    for given in (biases, []):
        found = Product(weights, given, dtype)(x)
        expected = exact + torch.cat(given).double() if given else exact
        assert found.dtype == dtype and found.shape == expected.shape
        difference = (found.double() - expected).abs().max()
        assert difference <= unit * expected.abs().max()

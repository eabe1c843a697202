"""Products of few rows against the same in float64, and the library that a CPU multiplies with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from torch_gpt2 import products
from torch_gpt2.device import select_device
from torch_gpt2.parallel.world import World
from torch_gpt2.products import Product, use_fastest_products

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


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    products._set_onednn(False)


def uses_onednn() -> bool:
    return bool(torch.backends.mkldnn.matmul.fp32_precision == "bf16")  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class TwoRanks(World):
    """A world whose other rank answers ``other``."""

    other: float = 1.0

    def sum(self, *values: float) -> list[float]:
        return [value + self.other for value in values]


@pytest.mark.parametrize(
    ("gain", "other", "chosen"), [(2.0, 1.0, True), (1.1, 1.0, False), (2.0, 0.0, False)]
)
def test_all_ranks_must_find_it_faster(
    monkeypatch: pytest.MonkeyPatch, gain: float, other: float, chosen: bool
) -> None:
    monkeypatch.setattr(products, "_gain", lambda: gain)
    use_fastest_products(select_device("cpu"), TwoRanks(size=2, other=other))
    assert uses_onednn() is chosen


def test_products_that_round_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with matrix units would round like this, unless the setting is off."""

    def rounding(x: torch.Tensor, weight: torch.Tensor, bias: object = None) -> torch.Tensor:
        return (x.bfloat16() @ weight.bfloat16().t()).float() if uses_onednn() else x @ weight.t()

    assert products._gain() > 0 or torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr(F, "linear", rounding)
    assert products._gain() == 0
    assert not uses_onednn(), "left as it was"

"""The library that multiplies float32 matrices of a CPU."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from torch_gpt2 import products
from torch_gpt2.device import select_device
from torch_gpt2.parallel.world import World
from torch_gpt2.products import use_fastest_products


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

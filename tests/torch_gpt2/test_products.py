"""Products of few rows against the same in float64, and how many operators a token takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.config.schema import ModelConfig, PrecisionConfig
from torch_gpt2 import products
from torch_gpt2.device import select_device
from torch_gpt2.int8 import Int8Linear, PackedInt8Linear
from torch_gpt2.model import GPT2
from torch_gpt2.predict import Decoder
from torch_gpt2.private_api import packs_integers
from torch_gpt2.products import Product

IN, OUT = 96, (33, 64)
CPUS = ("as it is", "no oneDNN", "nothing fused", "no narrow kernels")


def alter(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu == "no oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    elif cpu == "nothing fused":
        monkeypatch.setattr(products, "fuses_products", lambda: False)
    elif cpu == "no narrow kernels":
        monkeypatch.setattr(products, "has_kernel", lambda dtype: dtype == torch.float32)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_equal_float64(
    cpu: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tolerance: float32's error of sums of 96 products; in bfloat16 the rounding of the result,
    where nothing is fused of the product and of what follows, 2**-8 of the largest each.
    """
    alter(cpu, monkeypatch)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights, biases = [draw(out, IN) / 10 for out in OUT], [draw(out) for out in OUT]
    x, other = draw(1, rows, IN), draw(1, rows, sum(OUT))
    product = Product(weights, biases, dtype, 1)
    exact = x.double() @ torch.cat(weights).double().T + torch.cat(biases).double()
    without_bias = Product(weights, [], dtype, 1)
    cases = {
        "product": (product(x), exact),
        "gelu": (product.gelu(x), torch.nn.functional.gelu(exact, approximate="tanh")),
        "sum": (product.add(x, other), other.double() + exact),
        "no bias": (without_bias(x), exact - torch.cat(biases).double()),
    }
    unit = 2e-6 if dtype == torch.float32 else 2 * 2**-8
    for name, (found, expected) in cases.items():
        assert found.dtype == dtype and found.shape == expected.shape, name
        difference = (found.double() - expected).abs().max()
        assert difference <= unit * expected.abs().max(), name


@pytest.mark.parametrize("input_scale", [None, 0.01])
def test_packed_integers_give_the_same_bits(input_scale: float | None) -> None:
    """With sums that float32 does not hold exactly: 4096 products of up to 127 x 127."""
    if not packs_integers():
        pytest.skip("this processor has no exact product of packed 8 bits")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(60, 128, (70, 4096), dtype=torch.int8, generator=generator)
    scales, bias = torch.rand(70, generator=generator), torch.randn(70, generator=generator)
    arguments = (weight, scales, bias, input_scale)
    x = torch.randn(2, 9, 4096, generator=generator).abs() + 1.0
    x[1, 3] = 0.0
    expected = Int8Linear(*arguments)(x)
    assert torch.equal(PackedInt8Linear(*arguments)(x), expected)
    assert expected.isfinite().all()


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_step(layers: int) -> int:
    config = ModelConfig(
        num_layers=layers,
        hidden_size=32,
        num_heads=4,
        seq_length=16,
        vocab_size=101,
        ffn_hidden_size=128,
        max_positions=16,
    )
    decoder = Decoder(GPT2(config, PrecisionConfig(), vocab_rows=101), select_device("cpu"), 1)
    decoder.start([[1, 2, 3]], 4)
    with Counting() as counting:
        decoder.step([4])
    return counting.count


def test_a_layer_takes_few_operators_for_a_token() -> None:
    """Each costs a token of the 124M about 2 us, with caches that its weights have swept."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this CPU has no oneDNN")
    assert operators_of_a_step(3) - operators_of_a_step(2) <= 22

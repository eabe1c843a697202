"""The norm over all gradients against float64, for sizes at which adding squares one by one in
float32 loses digits.
"""

import math

import numpy as np
import pytest
import torch

from torch_gpt2.optimizer import global_norm


@pytest.mark.parametrize(
    "shapes", [[(50304, 48)], [(7,), (1024,), (1025,), (3, 1000), (0,)], [(2_500_001,), (32, 32)]]
)
def test_the_norm_has_the_digits_of_float32(shapes: list[tuple[int, ...]]) -> None:
    generator = np.random.default_rng(0)
    # few large and many small, as the gradient of an embedding has them
    values = [
        (generator.standard_normal(shape) * generator.random(shape) ** 8).astype(np.float32)
        for shape in shapes
    ]
    expected = math.sqrt(sum(float(np.square(each.astype(np.float64)).sum()) for each in values))
    for given in (
        [torch.from_numpy(each) for each in values],
        [torch.from_numpy(each).T.contiguous().T for each in values],
    ):
        found = global_norm(given)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1500, 2047])
def test_what_is_not_finite_shows(poison: float, place: int) -> None:
    gradient = torch.ones(2048)
    gradient[place] = poison
    assert not math.isfinite(global_norm([torch.ones(3), gradient]).item())

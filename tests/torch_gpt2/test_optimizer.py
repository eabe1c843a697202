"""The norm over all gradients against float64, for sizes at which adding squares one by one in float32 loses digits.

Loss scale and clip factor on the device are compared with those of the host.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from common.config.schema import LossScaleConfig, OptimizerConfig
from common.config.values import RULES, RuleName
from common.parallel.updates import LossScale, clip_factor as clip_factor_of_host
from torch_gpt2.optimizer import DeviceLossScale, build_optimizer, clip_factor, global_norm


@pytest.mark.parametrize("shapes", [[(50304, 48)], [(7,), (1024,), (1025,), (3, 1000), (0,)], [(2_500_001,), (32, 32)]])
def test_the_norm_has_the_digits_of_float32(shapes: list[tuple[int, ...]]) -> None:
    generator = np.random.default_rng(0)
    # few large and many small, as the gradient of an embedding has them
    values = [(generator.standard_normal(shape) * generator.random(shape) ** 8).astype(np.float32) for shape in shapes]
    expected = math.sqrt(sum(float(np.square(each.astype(np.float64)).sum()) for each in values))
    for given in (
        [torch.from_numpy(each) for each in values],
        [torch.from_numpy(each).T.contiguous().T for each in values],
    ):
        found = global_norm(given)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(expected, rel=2e-7)


def test_values_that_are_not_finite_show() -> None:
    for poison in (math.inf, math.nan):
        for place in (0, 1500, 2047):
            gradient = torch.ones(2048)
            gradient[place] = poison
            assert not math.isfinite(global_norm([torch.ones(3), gradient]).item())


@pytest.mark.parametrize("mode", ["dynamic", "static", "none"])
def test_loss_scale_on_the_device_is_the_hosts(mode: str) -> None:
    """60 random verdicts, with a window, a hysteresis and a minimum that all act."""
    limits = {"window": 3, "hysteresis": 2, "minimum": 2.0}
    config = LossScaleConfig(mode=mode, initial=64.0, factor=3.0, **limits)
    host, device = LossScale(config), DeviceLossScale(config, torch.device("cpu"))
    seen = set()
    for finite in np.random.default_rng(5).random(60) < 0.6:
        host.update(bool(finite))
        device.update(torch.tensor(bool(finite)))
        found = device.value.item(), device.finite_steps.item(), device.overflows.item()
        assert found == (host.value, host.finite_steps, host.overflows)
        seen.add(host.value)
    expected = {"static": {64.0}, "none": {1.0}}.get(mode, seen)
    assert seen == expected and (mode != "dynamic" or (len(seen) > 3 and min(seen) == 2.0))


@pytest.mark.parametrize("limit", [0.0, 0.7, 1.0])
def test_the_clip_factor_on_the_device_is_the_hosts(limit: float) -> None:
    for norm in (*np.random.default_rng(0).lognormal(size=200), 0.0, math.inf):
        found = clip_factor(torch.tensor(norm, dtype=torch.float64), limit).item()
        assert found == clip_factor_of_host(norm, limit)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", RULES)
def test_the_table_of_rules_says_what_torch_keeps(name: RuleName, momentum: float) -> None:
    """A step without a gradient: the decay is in the moments, unless it is decoupled."""
    config = OptimizerConfig(name=name, learning_rate=0.1, momentum=momentum, weight_decay=0.5)
    weight = nn.Parameter(torch.full((2, 3), 3.0))
    weight.grad = torch.zeros(2, 3)
    optimizer = build_optimizer({"h.0.mlp.c_fc.weight": weight}, config, fused=False)
    optimizer.step()
    state = {key: value for key, value in optimizer.state[weight].items() if value is not None}
    counter = state.pop("step", None)
    assert (counter is not None and counter.dtype == torch.float32) == config.rule.counts_updates
    assert set(state) == set(config.state_parts)
    for value in state.values():
        assert (value.shape, value.dtype) == ((2, 3), torch.float32)
        assert value.any().item() is not config.rule.decouples_decay

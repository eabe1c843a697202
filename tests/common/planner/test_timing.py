"""Parts of a step's time, against the arithmetic written out."""

from typing import Any

import pytest

from common.accelerators import require_accelerator
from common.errors import ConfigError
from common.planner.plan import make_plan, time_of
from common.planner.timing import ELEMENTS, PRODUCTS, StepTime
from tests.common.planner.runs import small

LAYERS, WIDTH, TOKENS = 4, 64, 32 * 2


def time(accelerator: str, micro_batches: int = 1, stages: int = 1, **precision: Any) -> StepTime:
    train = {"accumulation_steps": micro_batches, "recompute": "full", "recompute_layers": 1}
    model = {"hidden_size": WIDTH, "vocab_size": 100}
    config = small(pipeline=stages, model=model, train=train, precision=precision)
    return time_of(make_plan(config), config, require_accelerator(accelerator))


@pytest.mark.parametrize(("scaling", "copies"), [("tensorwise", 19 / 3), ("rowwise", 20 / 3)])
def test_linear_layers_take_half_the_time_and_copies_are_added(scaling: str, copies: float) -> None:
    plain, found = (time("H100", compute="bfloat16", float8=each) for each in ("none", scaling))
    weights = 12 * WIDTH * WIDTH
    passes = 3 * LAYERS + 1
    saved = 2 * weights * TOKENS * passes * (1 / 989.4e12 - 1 / 1978.9e12)
    assert plain.products - found.products == pytest.approx(saved / PRODUCTS)
    # inputs: q, k, v, the projection and the first of the MLP (5 widths), its second one (4)
    elements = 2 * 9 * WIDTH * TOKENS
    added = LAYERS * (copies * elements + 28 * weights) / 3.35e12 / ELEMENTS["compiled"]
    assert found.elements - plain.elements == pytest.approx(added)
    three = time("H100", 3, compute="bfloat16", float8=scaling)
    assert three.elements == pytest.approx(3 * found.elements)
    assert three.products == pytest.approx(3 * found.products)


def test_the_head_takes_half_the_time() -> None:
    plain, found = (time("H100", compute="bfloat16", float8_head=each) for each in (False, True))
    rows = 128  # 100 tokens, padded
    saved = 6 * rows * WIDTH * TOKENS * (1 / 989.4e12 - 1 / 1978.9e12)
    assert plain.products - found.products == pytest.approx(saved / PRODUCTS)
    assert plain.elements == found.elements


def test_stages_wait_for_their_part_of_the_whole() -> None:
    """Megatron, arXiv 2104.04473, section 2.2.1: (p - 1) / m of the work."""
    found = time("H100", 8, stages=2, compute="bfloat16")
    assert found.waiting == pytest.approx((found.products + found.elements) / 8)


def test_a_device_without_float8_is_refused() -> None:
    with pytest.raises(ConfigError, match="A100 has no products of float8; choose H200, H100 PCIe"):
        time("A100", compute="bfloat16", float8="tensorwise")


def layout(name: str, devices: int, zero: int, pipeline: int = 1, **train: Any) -> StepTime:
    """A step of 13 billion parameters."""
    model = {"num_layers": 40, "hidden_size": 5120, "num_heads": 40, "seq_length": 2048}
    config = small(
        data=devices // pipeline,
        pipeline=pipeline,
        precision="fp16",
        model={**model, "vocab_size": 50368},
        train={"accumulation_steps": None, "recompute": "full", **train},
        parallel={"zero_stage": zero},
    )
    return time_of(make_plan(config), config, require_accelerator(name))


def test_eight_devices_leave_a_server_by_eight_adapters() -> None:
    """llm-foundry measured 0.855, 0.859 and 0.853 s of 13B with ZeRO 3 on 8, 16 and 64 H100s."""
    alone, *more = (layout("H100", devices, 3).total for devices in (8, 16, 64))
    assert more == pytest.approx([alone, alone], rel=0.1)


def test_a_pipeline_hides_no_more_with_zero_2_than_with_zero_1() -> None:
    """Both send gradients once, behind all micro batches."""
    train = {"micro_batch_size": 1, "accumulation_steps": 8}
    one, two = (layout("Ascend 910A", 64, zero, 4, **train) for zero in (1, 2))
    assert two == one and one.data > 0

"""Time of a step in float8, against the arithmetic written out."""

from typing import Any

import pytest

from common.accelerators import require_accelerator
from common.config.load import build_config
from common.errors import ConfigError
from common.planner.plan import make_plan, time_of
from common.planner.timing import PRODUCTS, StepTime
from common.resolve.derive import resolve_config

LAYERS, WIDTH, WINDOW, MICRO = 4, 64, 32, 2
TOKENS = WINDOW * MICRO


def time(accelerator: str, micro_batches: int = 1, stages: int = 1, **precision: Any) -> StepTime:
    config = resolve_config(
        build_config(
            {
                "output_dir": "out",
                "parallel": {"pipeline_stage": stages},
                "precision": precision,
                "model": {
                    "num_layers": LAYERS,
                    "hidden_size": WIDTH,
                    "num_heads": 4,
                    "seq_length": WINDOW,
                    "vocab_size": 100,
                },
                "train": {
                    "max_steps": 1,
                    "micro_batch_size": MICRO,
                    "accumulation_steps": micro_batches,
                    "recompute": "full",
                    "recompute_layers": 1,
                },
                "optimizer": {"learning_rate": 1e-3},
            }
        ),
        world_size=stages,
    )
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
    added = LAYERS * (copies * elements + 28 * weights) / 3.35e12
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

"""Positions whose logits exist at one time, by the memory of the device."""

import pytest

from common.accelerators import GIB, Hardware
from common.parallel.loss_rows import loss_rows
from common.planner.plan import make_plan
from common.resolve.derive import resolve_config
from common.run_config import load_config
from tests.common.config.test_presets import ROOT

PRESET = ROOT / "configs/gpt2/run_gpt2_124m.yaml"


@pytest.mark.parametrize(
    ("overrides", "memory", "rows"),
    [
        ((), None, 1024),
        ((), 80 * GIB, 16_384),
        ((), 32 * GIB, 4096),
        ((), 8 * GIB, 1024),
        (("parallel.model_parallel=2",), 32 * GIB, 8192),
        (("train.loss_rows=100",), 80 * GIB, 100),
    ],
)
def test_logits_take_a_share_of_the_memory(
    overrides: tuple[str, ...], memory: int | None, rows: int
) -> None:
    ranks = 2 if overrides and "parallel" in overrides[0] else 1
    config = resolve_config(load_config(PRESET, overrides), world_size=ranks)
    assert loss_rows(config, memory) == rows


def test_the_plan_of_an_accelerator_counts_them() -> None:
    written = load_config(PRESET, ("precision=bf16", "train.micro_batch_size=12"))
    config = resolve_config(written)
    known = resolve_config(written, hardware=Hardware(kind="cuda", memory=80 * GIB))
    rows = config.train.micro_batch_size * config.model.seq_length
    assert 1024 < rows < 16_384
    more = make_plan(known).peak - make_plan(config).peak
    # float32 logits and their half-precision slope; and the head's gradient, which either has
    assert more == (rows - 1024) * config.vocab_rows * (4 + 4)

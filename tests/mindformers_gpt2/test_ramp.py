"""Runs on MindSpore whose batch grows: torch's losses and gradient norms, an exact resume, and
layouts that equal one process.
"""

import tests.needs_both  # noqa: F401

# isort: split
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import require_equal, require_same_bits, rows_of, train_here
from tests.torch_gpt2.test_ramp import BY_SAMPLES, SIZES, STEPS, make_tree


@pytest.mark.long
def test_a_run_equals_torchs(tmp_path: Path, corpus_prefix: Path) -> None:
    """float32 on other kernels: 1e-5, as tests/parity/test_one_device.py."""

    def train(name: str, **changes: Any) -> Path:
        keys = {"model__num_layers": 1, "validation__max_samples": 2, **BY_SAMPLES, **changes}
        return train_here(make_tree(tmp_path / name, corpus_prefix, **keys))

    # three steps in flight, in which the size changes
    changes = {"train__rampup_batch_size": STEPS, "train__sink_size": 3}
    run = train("run", backend="mindspore", **changes)
    require_equal(run, train("torch"), 1e-5)
    assert [row["global_batch_size"] for row in rows_of(run)] == SIZES


@pytest.mark.campaign
def test_parts_of_a_run_equal_the_whole(tmp_path: Path, corpus_prefix: Path) -> None:
    """Bit for bit, with dropout."""
    keys: dict[str, Any] = {"optimizer__decay_steps": 8, "model__dropout": 0.1}
    for name, steps in (("whole", 8), ("parts", 4), ("parts", 8)):
        tree = make_tree(tmp_path / name, corpus_prefix, train__max_steps=steps, **keys)
        train_here(tree | {"backend": "mindspore"})
    require_same_bits(tmp_path / "parts", tmp_path / "whole")

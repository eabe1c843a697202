"""Runs on MindSpore whose batch grows: torch's losses and gradient norms, an exact resume, and
layouts that equal one process.
"""

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
pytest.importorskip("torch")

import mindformers_gpt2.train
import torch_gpt2.train
from common.config.load import build_config
from common.inputs import make_run
from common.resolve.derive import resolve_config
from tests.ranks import run_ranks
from tests.torch_gpt2.test_ramp import BY_SAMPLES, SIZES, STEPS, make_tree, require_equal, rows_of
from tests.torch_gpt2.test_train import assert_same_run


@pytest.mark.long
def test_a_run_equals_torchs(tmp_path: Path, corpus_prefix: Path) -> None:
    """float32 on other kernels: 1e-5, as tests/parity/test_one_device.py."""

    def config(name: str, **changes: Any) -> Any:
        keys = {"model__num_layers": 1, "validation__max_samples": 2, **BY_SAMPLES, **changes}
        return resolve_config(build_config(make_tree(tmp_path / name, corpus_prefix, **keys)))

    torch_gpt2.train.train(*make_run(config("torch")))
    # three steps in flight, in which the size changes
    changes = {"train__rampup_batch_size": STEPS, "train__sink_size": 3}
    mindformers_gpt2.train.train(*make_run(config("run", backend="mindspore", **changes)))
    require_equal(tmp_path / "run", tmp_path / "torch", 1e-5)
    assert [row["global_batch_size"] for row in rows_of(tmp_path / "run")] == SIZES


@pytest.mark.campaign
def test_parts_of_a_run_equal_the_whole(tmp_path: Path, corpus_prefix: Path) -> None:
    """Bit for bit, with dropout."""
    keys: dict[str, Any] = {"optimizer__decay_steps": 8, "model__dropout": 0.1}
    for name, steps in (("whole", 8), ("parts", 4), ("parts", 8)):
        tree = make_tree(
            tmp_path / name, corpus_prefix, backend="mindspore", train__max_steps=steps, **keys
        )
        mindformers_gpt2.train.train(*make_run(build_config(tree)))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"parallel__model_parallel": 2},
    "zero1": {"parallel__zero_stage": 1},
    "1f1b": {"parallel__pipeline_stage": 2},
    "gpipe": {"parallel__pipeline_stage": 2, "parallel__pipeline_schedule": "gpipe"},
}


@pytest.mark.campaign
def test_two_ranks_equal_one_process(tmp_path: Path, corpus_prefix: Path) -> None:
    """With dropout, whose masks follow the samples."""

    def job(name: str, **changes: Any) -> dict[str, Any]:
        keys = {"backend": "mindspore", "model__hidden_dropout": 0.1, **changes}
        return make_tree(tmp_path / name, corpus_prefix, **keys)

    run_ranks(1, [job("one")])
    run_ranks(2, [job(name, **keys) for name, keys in LAYOUTS.items()])
    for name in LAYOUTS:
        require_equal(tmp_path / name, tmp_path / "one", 1e-5)

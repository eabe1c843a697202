"""Both backends train from the same MindRecord, and from the pair that it was written from, in file
order.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
pytest.importorskip("torch")

import mindformers_gpt2.train
import torch_gpt2.train
from common.config.load import build_config
from common.config.schema import RunConfig
from common.resolve.derive import resolve_config
from common.training.metrics import read_metrics
from mindformers_gpt2.mindrecord import write_mindrecord
from tests.config_overrides import changed

STEPS = 6


def make_config(folder: Path, data: Path, **changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "device": "cpu",
        "model": {
            "num_layers": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "seq_length": 24,
            "vocab_size": 101,
        },
        "train": {"max_steps": STEPS, "micro_batch_size": 2, "global_batch_size": 4},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "decay_steps": 20},
        "data": {"train": str(data), "split": "90,10,0"},
        "validation": {"max_samples": 4},
        "logging": {"tensorboard": False, "plot": False},
    }
    return resolve_config(build_config(changed(tree, changes)))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def test_runs_over_one_mindrecord_are_equal(tmp_path: Path, corpus_prefix: Path) -> None:
    """Losses within 1e-4 relative, as over a pair; equal hashes: the same rows in the same shuffled
    order.
    """
    write_mindrecord(corpus_prefix, tmp_path / "data" / "corpus.mindrecord", 24, 3)
    for data in (tmp_path / "data", tmp_path / "data" / "corpus.mindrecord1"):
        torch_gpt2.train.train(make_config(tmp_path / data.name / "torch", data))
    mindformers_gpt2.train.train(make_config(tmp_path / "data" / "mindspore", tmp_path / "data"))
    expected, found = rows_of(tmp_path / "data" / "torch"), rows_of(tmp_path / "data" / "mindspore")
    assert len(expected) == len(found) == STEPS
    assert [row["sample_hash"] for row in found] == [row["sample_hash"] for row in expected]
    np.testing.assert_allclose(
        [row["loss"] for row in found], [row["loss"] for row in expected], rtol=1e-4
    )
    one_shard = rows_of(tmp_path / "corpus.mindrecord1" / "torch")
    assert [row["loss"] for row in one_shard] == [row["loss"] for row in expected], (
        "one shard stands for its set"
    )


def test_in_file_order_a_mindrecord_trains_as_its_pair(tmp_path: Path, corpus_prefix: Path) -> None:
    write_mindrecord(corpus_prefix, tmp_path / "corpus.mindrecord", 24)
    for name, data in (("pair", corpus_prefix), ("record", tmp_path / "corpus.mindrecord")):
        torch_gpt2.train.train(
            make_config(tmp_path / name, data, data__shuffle=False, data__split="1,0,0")
        )
    assert [row["loss"] for row in rows_of(tmp_path / "record")] == [
        row["loss"] for row in rows_of(tmp_path / "pair")
    ]

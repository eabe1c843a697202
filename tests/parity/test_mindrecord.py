"""Both backends train from the same MindRecord, and from the pair that it was written from, in file
order.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
pytest.importorskip("torch")

import mindformers_gpt2.evaluate
import mindformers_gpt2.train
import torch_gpt2.evaluate
import torch_gpt2.train
from common.config.load import build_config
from common.config.schema import RunConfig
from common.inputs import make_run
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
        torch_gpt2.train.train(*make_run(make_config(tmp_path / data.name / "torch", data)))
    mindformers_gpt2.train.train(
        *make_run(
            make_config(tmp_path / "data" / "mindspore", tmp_path / "data", backend="mindspore")
        )
    )
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
            *make_run(make_config(tmp_path / name, data, data__shuffle=False, data__split="1,0,0"))
        )
    assert [row["loss"] for row in rows_of(tmp_path / "record")] == [
        row["loss"] for row in rows_of(tmp_path / "pair")
    ]


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_a_blend_of_a_pair_and_a_mindrecord_is_validated_as_each_by_itself(
    tmp_path: Path, corpus_prefix: Path, backend: str
) -> None:
    """The loss is the mean over all tokens of 5 and 2 windows, in batches of at most 2."""
    train, evaluate, keys = {
        "torch": (torch_gpt2.train.train, torch_gpt2.evaluate.evaluate, {}),
        "mindspore": (  # graphs would take seconds each to compile
            mindformers_gpt2.train.train,
            mindformers_gpt2.evaluate.evaluate,
            {"context__mode": "pynative"},
        ),
    }[backend]
    keys |= {"backend": backend, "train__max_steps": 1}
    other, run = tmp_path / "other.mindrecord", tmp_path / "run"
    write_mindrecord(corpus_prefix.with_name("other"), other, 24)
    blend = [3, str(corpus_prefix), 1, str(other)]
    train(
        *make_run(
            make_config(run, corpus_prefix, data__train=blend, validation__max_samples=7, **keys)
        )
    )
    *_, row = read_metrics(run / "metrics.jsonl")
    total = 0.0
    for data, windows in ((corpus_prefix, 5), (other, 2)):
        evaluate(*make_run(make_config(run, data, validation__max_samples=windows, **keys), "eval"))
        found = json.loads((run / "evaluation.json").read_text())
        assert row[f"validation_tokens/{data.name}"] == found["tokens"] == windows * 24
        loss = found["validation_loss"]
        assert row[f"validation_loss/{data.name}"] == pytest.approx(loss, rel=1e-6)
        total += loss * windows / 7
    assert row["validation_tokens"] == 7 * 24
    assert row["validation_loss"] == pytest.approx(total, rel=1e-6)

"""Both backends train from the same MindRecord, and from the pair that it was written from, in file
order.
"""

import tests.needs_both  # noqa: F401

# isort: split
import json
from pathlib import Path
from typing import Any

import pytest

import mindformers_gpt2.evaluate
import torch_gpt2.evaluate
from common.backends import make_run
from common.config.load import build_config
from common.training.metrics import read_metrics
from mindformers_gpt2.mindrecord import write_mindrecord
from tests.tiny import require_equal, results_of, rows_of, tiny_run, train_here

STEPS = 6


def make_tree(folder: Path, data: Path, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "model__num_layers": 1,
        "model__hidden_size": 16,
        "model__num_heads": 2,
        "model__seq_length": 24,
        "train__max_steps": STEPS,
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "decay_steps": 20},
        "validation": {"max_samples": 4},
    }
    return tiny_run(folder, data, **(usual | changes))


def test_runs_over_one_mindrecord_are_equal(tmp_path: Path, corpus_prefix: Path) -> None:
    """Losses within 1e-4 relative, as over a pair; equal hashes: the same rows in the same shuffled
    order.
    """
    write_mindrecord(corpus_prefix, tmp_path / "data" / "corpus.mindrecord", 24, 3)
    data = tmp_path / "data"
    expected, one_shard = (
        train_here(make_tree(tmp_path / f"torch {each.name}", each)) for each in (data, data / "corpus.mindrecord1")
    )
    found = train_here(make_tree(tmp_path / "mindspore", data, backend="mindspore"))
    assert len(rows_of(expected)) == STEPS
    require_equal(found, expected, 1e-4, grad_norm=1e-3)
    assert results_of(one_shard) == results_of(expected), "one shard stands for its set"


def test_in_file_order_a_mindrecord_trains_as_its_pair(tmp_path: Path, corpus_prefix: Path) -> None:
    record = tmp_path / "corpus.mindrecord"
    write_mindrecord(corpus_prefix, record, 24)
    one, other = (
        train_here(make_tree(tmp_path / name, data, data__shuffle=False, data__split="1,0,0"))
        for name, data in (("pair", corpus_prefix), ("record", record))
    )
    assert [row["loss"] for row in rows_of(one)] == [row["loss"] for row in rows_of(other)]


@pytest.mark.parametrize("module", [torch_gpt2, mindformers_gpt2])
def test_a_blend_of_a_pair_and_a_mindrecord_is_validated_as_each_by_itself(
    tmp_path: Path, corpus_prefix: Path, module: Any
) -> None:
    """The loss is the mean over all tokens of 5 and 2 windows, in batches of at most 2."""
    keys: dict[str, Any] = {"train__max_steps": 1}
    if module is mindformers_gpt2:  # graphs would take seconds each to compile
        keys |= {"backend": "mindspore", "context__mode": "pynative"}
    other, run = tmp_path / "other.mindrecord", tmp_path / "run"
    write_mindrecord(corpus_prefix.with_name("other"), other, 24)
    blend = [3, str(corpus_prefix), 1, str(other)]
    tree = make_tree(run, corpus_prefix, data__train=blend, validation__max_samples=7, **keys)
    *_, row = read_metrics(train_here(tree) / "metrics.jsonl")
    total = 0.0
    for data, windows in ((corpus_prefix, 5), (other, 2)):
        tree = make_tree(run, data, validation__max_samples=windows, **keys)
        module.evaluate.evaluate(*make_run(build_config(tree), "eval"))
        found = json.loads((run / "evaluation.json").read_text())
        assert row[f"validation_tokens/{data.name}"] == found["tokens"] == windows * 24
        loss = found["validation_loss"]
        assert row[f"validation_loss/{data.name}"] == pytest.approx(loss, rel=1e-6)
        total += loss * windows / 7
    assert row["validation_tokens"] == 7 * 24
    assert row["validation_loss"] == pytest.approx(total, rel=1e-6)

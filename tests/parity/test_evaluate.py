"""Scores of both backends on the same weights, and the figures that a checkpoint gets from each."""

import tests.needs_both  # noqa: F401

# isort: split
import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch

import mindformers_gpt2.device
import mindformers_gpt2.evaluate
import mindformers_gpt2.model
import torch_gpt2.device
import torch_gpt2.evaluate
import torch_gpt2.model
from common.backends import make_run
from common.config.load import build_config
from common.evaluation.rows import ScoredRow, score_rows
from tests.tiny import tiny_config, tiny_run, train_here
from tests.twins import mindspore_twin, random_model


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_every_row_has_the_same_loss_and_hits(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """float32: 1e-5. Chunks of 7 of 4 x 5 targets, a last batch of 1 row. Half of the rows end as
    the model continues.
    """
    config = tiny_config(model__seq_length=24, model__vocab_multiple=16)
    one = random_model(std=0.2, positions=None, seq_length=24)
    other = mindspore_twin(config, one)
    generator, rows = np.random.default_rng(0), []
    for number in range(9):
        tokens = generator.integers(0, 101, int(generator.integers(8, 26))).astype(np.int32)
        if number % 2:
            with torch.no_grad():
                hidden = one(torch.from_numpy(tokens[None, :-1]).long())
                tokens[-1] = int(one.logits(hidden)[0, -1].argmax())
        rows.append(ScoredRow(tokens=tokens, scored=1 + number % 5))
    monkeypatch.setattr(torch_gpt2.evaluate, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(mindformers_gpt2.evaluate, "ROWS_AT_ONCE", 7)
    scorer = torch_gpt2.evaluate.make_scorer(one, torch_gpt2.device.select_device("cpu"))
    expected = score_rows(rows, scorer, 4)
    try:
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        device = mindformers_gpt2.device.select_device("cpu")
        found = score_rows(rows, mindformers_gpt2.evaluate.make_scorer(other, device), 4)
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    np.testing.assert_allclose(found.nats, expected.nats, rtol=1e-5)
    np.testing.assert_array_equal(found.hits, expected.hits)
    assert expected.hits[1::2].min() == 1


def test_a_checkpoint_has_the_same_figures(
    tmp_path: Path, corpus_prefix: Path, gpt2_vocab_files: tuple[Path, Path]
) -> None:
    quote = "It was the best of times, it was the worst of times.\n"
    (tmp_path / "text.txt").write_text(quote * 12)
    passages = ("the age of wisdom, the age of foolishness", "we had everything before us")
    rows = [json.dumps({"text": passage}) + "\n" for passage in passages]
    (tmp_path / "passages.jsonl").write_text("".join(rows))
    files = {"vocab_file": str(gpt2_vocab_files[0]), "merge_file": str(gpt2_vocab_files[1])}
    keys: dict[str, Any] = {
        "model__hidden_size": 16,
        "model__num_layers": 1,
        "model__num_heads": 2,
        "model__seq_length": 24,
        "model__vocab_size": 50257,
        "train__max_steps": 1,
        "data__tokenizer": files,
    }
    run = train_here(tiny_run(tmp_path / "run", corpus_prefix, **keys))
    tasks: dict[str, dict[str, Any]] = {
        "text": {"file": str(tmp_path / "text.txt"), "stride": 10, "batch_size": 4},
        "lambada": {"file": str(tmp_path / "passages.jsonl"), "batch_size": 2},
    }
    for task, settings in tasks.items():
        results = []
        for module, backend in ((torch_gpt2, "torch"), (mindformers_gpt2, "mindspore")):
            words = {"evaluation": {"task": task} | settings, "backend": backend}
            tree = tiny_run(run, corpus_prefix, **keys, **words)
            module.evaluate.evaluate(*make_run(build_config(tree), "eval"))
            results.append(json.loads((run / f"evaluation_{task}.json").read_text()))
        assert results[0] == {
            key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            for key, value in results[1].items()
        }
        assert results[0]["loss"] > 5

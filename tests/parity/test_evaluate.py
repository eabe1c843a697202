"""Scores of both backends on the same weights, and the figures that a checkpoint gets from each."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
ms = pytest.importorskip(
    "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
)
torch = pytest.importorskip("torch")

import mindformers_gpt2.device  # noqa: E402
import mindformers_gpt2.evaluate  # noqa: E402
import mindformers_gpt2.model  # noqa: E402
import torch_gpt2.device  # noqa: E402
import torch_gpt2.evaluate  # noqa: E402
import torch_gpt2.model  # noqa: E402
import torch_gpt2.train  # noqa: E402
from common.config.load import build_config  # noqa: E402
from common.config.schema import RunConfig  # noqa: E402
from common.evaluation.rows import ScoredRow, score_rows  # noqa: E402
from common.inputs import make_run  # noqa: E402
from common.resolve.derive import resolve_config  # noqa: E402


def make_config(folder: Path, model: dict[str, Any], **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "device": "cpu",
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "seq_length": 24,
            "vocab_size": 101,
        }
        | model,
        "train": {"max_steps": 1, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 0.01},
        "logging": {"tensorboard": False, "plot": False},
    }
    return resolve_config(build_config(tree | sections))


@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_every_row_has_the_same_loss_and_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """float32: 1e-5. Chunks of 7 of 4 x 5 targets, a last batch of 1 row. Half of the rows end as
    the model continues.
    """
    config = make_config(tmp_path, {})
    one = torch_gpt2.model.build_model(config, torch_gpt2.device.select_device("cpu"))
    torch.manual_seed(0)
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    device = mindformers_gpt2.device.select_device("cpu")
    other = mindformers_gpt2.model.build_model(config, device)
    for parameter in other.get_parameters():
        ms.ops.assign(parameter, ms.Tensor(one.get_parameter(parameter.name).detach().numpy()))
    generator = np.random.default_rng(0)
    rows = []
    for number in range(9):
        tokens = generator.integers(0, 101, int(generator.integers(8, 26))).astype(np.int32)
        if number % 2:
            with torch.no_grad():
                tokens[-1] = int(
                    one.logits(one(torch.from_numpy(tokens[None, :-1]).long()))[0, -1].argmax()
                )
        rows.append(ScoredRow(tokens=tokens, scored=1 + number % 5))
    monkeypatch.setattr(torch_gpt2.evaluate, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(mindformers_gpt2.evaluate, "ROWS_AT_ONCE", 7)
    expected = score_rows(
        rows, torch_gpt2.evaluate.make_scorer(one, torch_gpt2.device.select_device("cpu")), 4
    )
    try:
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        found = score_rows(rows, mindformers_gpt2.evaluate.make_scorer(other, device), 4)
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)
    np.testing.assert_allclose(found.nats, expected.nats, rtol=1e-5)
    np.testing.assert_array_equal(found.hits, expected.hits)
    assert expected.hits[1::2].min() == 1


def test_a_checkpoint_has_the_same_figures(
    tmp_path: Path, corpus_prefix: Path, gpt2_vocab_files: tuple[Path, Path]
) -> None:
    (tmp_path / "text.txt").write_text(
        "It was the best of times, it was the worst of times.\n" * 12
    )
    passages = (
        "the age of wisdom, the age of foolishness",
        "the epoch of belief, the epoch of incredulity",
        "we had everything before us",
    )
    (tmp_path / "passages.jsonl").write_text(
        "".join(json.dumps({"text": passage}) + "\n" for passage in passages)
    )
    data = {
        "train": str(corpus_prefix),
        "split": "90,10,0",
        "tokenizer": {
            "vocab_file": str(gpt2_vocab_files[0]),
            "merge_file": str(gpt2_vocab_files[1]),
        },
    }
    model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50257}
    torch_gpt2.train.train(*make_run(make_config(tmp_path / "run", model, data=data)))
    tasks: dict[str, dict[str, Any]] = {
        "text": {"file": str(tmp_path / "text.txt"), "stride": 10, "batch_size": 4},
        "lambada": {"file": str(tmp_path / "passages.jsonl"), "batch_size": 2},
    }
    for task, settings in tasks.items():
        results = []
        for module, backend in (
            (torch_gpt2.evaluate, "torch"),
            (mindformers_gpt2.evaluate, "mindspore"),
        ):
            module.evaluate(
                *make_run(
                    make_config(
                        tmp_path / "run",
                        model,
                        data=data,
                        evaluation={"task": task} | settings,
                        backend=backend,
                    ),
                    "eval",
                )
            )
            results.append(json.loads((tmp_path / "run" / f"evaluation_{task}.json").read_text()))
        assert results[0] == {
            key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            for key, value in results[1].items()
        }
        assert results[0]["loss"] > 5

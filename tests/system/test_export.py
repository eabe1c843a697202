"""ONNX, GGUF and programs of torch of a trained run, through the command line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import yaml
from transformers import GPT2LMHeadModel

import common.conversion.check as check
from common.systems.onnx.session import logits
from run_gpt2 import main
from tools.convert_weight import main as convert

VOCABULARY = 101


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    """The config file of a run of one step on torch."""
    folder = tmp_path_factory.mktemp("run")
    tree = {
        "output_dir": str(folder / "run"),
        "device": "cpu",
        "model": {
            "num_layers": 2, "hidden_size": 32, "num_heads": 4, "seq_length": 16,
            "max_positions": 24, "vocab_size": VOCABULARY, "ffn_hidden_size": 96,
        },
        "train": {"max_steps": 1, "micro_batch_size": 2, "global_batch_size": 2},
        "optimizer": {"learning_rate": 0.1, "name": "sgd"},
        "data": {"train": str(corpus_prefix)},
        "logging": {"tensorboard": False, "plot": False},
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert main(["--config", str(file), "--run_mode", "train"]) == 0
    return file


def export(run: Path, *words: str) -> int:
    return main(["--config", str(run), "--run_mode", "export", "export.overwrite=true", *words])


def record_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "export.json").read_text())
    for name, described in record["files"].items():
        content = (folder / name).read_bytes()
        assert described == {
            "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(),
        }, name  # fmt: skip
    return record


def test_onnx_is_one_file_whichever_backend_asks(run: Path, tmp_path: Path) -> None:
    """And it computes what transformers does with the weights in its own format."""
    folder = run.parent / "run"
    assert export(run, "export.format=onnx") == 0
    record = record_of(folder / "onnx")
    assert set(record["largest_difference"]) == {
        "all tokens at once", "padding on the left", "token by token",
    }  # fmt: skip
    assert max(record["largest_difference"].values()) < 1e-5 and record["step"] == 1
    assert export(run, "export.format=onnx", "backend=mindspore") == 0
    other = record_of(folder / "onnx")
    assert other["files"] == record["files"]
    assert convert(["--to", "hf", "--input", str(folder), "--output", str(tmp_path / "hf")]) == 0
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 24))
    with torch.no_grad():
        expected = GPT2LMHeadModel.from_pretrained(tmp_path / "hf")(torch.from_numpy(ids)).logits
    found = logits(folder / "onnx", None, ids)
    assert np.abs(found - expected.numpy()).max() < 1e-5


def test_small_weights_gguf_and_no_cache(run: Path) -> None:
    folder = run.parent / "run"
    assert export(run, "export.format=onnx", "export.weights=int4", "export.cache=false") == 0
    record = record_of(folder / "onnx")
    assert (record["weights"], record["cache"]) == ("int4", False)
    assert set(record["largest_difference"]) == {"all tokens at once", "padding on the left"}
    assert export(run, "export.format=gguf", "export.weights=int8") == 0
    record_of(folder / "gguf")
    tensors = gguf.GGUFReader(folder / "gguf" / "model.gguf").tensors
    assert {tensor.tensor_type.name for tensor in tensors} == {"F32", "Q8_0"}


def test_a_program_of_torch(run: Path) -> None:
    assert export(run, "export.format=pt2") == 0
    record = record_of(run.parent / "run" / "pt2")
    assert set(record["largest_difference"]) == {
        "all tokens at once", "padding on the left", "token by token",
    }  # fmt: skip
    assert max(record["largest_difference"].values()) < 1e-5
    assert (record["torch"], record["step"]) == (torch.__version__, 1)
    assert set(record["files"]) == {"model.pt2", "config.json", "generation_config.json"}


@pytest.mark.parametrize("format", ["safetensors", "onnx", "gguf", "pt2"])
def test_an_export_is_replaced_only_if_asked(
    run: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    assert export(run, f"export.format={format}", "export.check=false") == 0
    words = ["--config", str(run), "--run_mode", "export", f"export.format={format}"]
    assert main(words) == 2
    assert "an export is there; add export.overwrite=true" in capsys.readouterr().err


def test_a_wrong_graph_gets_no_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong by a thousandth, and not a number."""
    right = check._whole
    words = [f"output_dir={tmp_path / 'out'}", f"checkpoint.load={run.parent / 'run'}"]
    for change in (lambda found: found + 1e-3, lambda found: found * np.nan):
        monkeypatch.setattr(check, "_whole", lambda *given, change=change: change(right(*given)))
        assert export(run, "export.format=onnx", *words) == 1
        assert "all tokens at once: its logits differ" in capsys.readouterr().err
        assert not (tmp_path / "out" / "onnx").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export.weights=int8"], "export.weights=int8 is for export.format=onnx and gguf"),
        (["export.format=gguf", "export.cache=false"], "export.cache=false is for"),
        (["export.format=pt2", "export.weights=int8"], "is for export.format=onnx and gguf, not"),
        (["export.format=pt2", "backend=mindspore"], "export.format=pt2 is for backend torch"),
        (["export.format=onnx", "export.batch_size=2"], "export.batch_size=2 is for"),
        (["export.format=onnx", "checkpoint.load=nowhere"], "nowhere"),
    ],
)
def test_bad_input(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, *words) == 2
    assert message in capsys.readouterr().err


def test_weights_of_8_bits_are_evaluated_on_integers(run: Path, tmp_path: Path) -> None:
    """The loss is the float model's but for rounding; MindSpore rounds the weights alone."""
    losses = []
    assert export(run, "export.format=safetensors", "export.weights=int8") == 0
    for folder, backend in (
        ("run", "torch"),
        ("run/weights", "torch"),
        ("run/weights", "mindspore"),
    ):
        words = ["--config", str(run), "--run_mode", "eval", f"output_dir={tmp_path}"]
        words += [f"checkpoint.load={run.parent / folder}", f"backend={backend}"]
        assert main(words) == 0
        losses.append(json.loads((tmp_path / "evaluation.json").read_text())["validation_loss"])
    expected, integers, rounded = losses
    assert 1e-7 < abs(integers - expected) < 1e-3
    assert 1e-7 < abs(rounded - expected) < 1e-3 and abs(rounded - integers) > 1e-7

"""ONNX, GGUF and programs of torch of a trained run, through the command line."""

import hashlib
import json
import resource
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import yaml
from transformers import GPT2LMHeadModel

import common.conversion.export as exports
from common.systems.onnx.folder import logits
from run_gpt2 import main
from tests.tiny import tiny_run
from tools.convert_weight import main as convert


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    """The config file of a run of one step on torch."""
    folder = tmp_path_factory.mktemp("run")
    tree = tiny_run(
        folder / "run", corpus_prefix, model__max_positions=24, model__ffn_hidden_size=96,
        train={"max_steps": 1, "micro_batch_size": 2, "global_batch_size": 2},
    )  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert main(["--config", str(file), "--run_mode", "train"]) == 0
    return file


def export(run: Path, *words: str) -> int:
    return main(["--config", str(run), "--run_mode", "export", "export.overwrite=true", *words])


def into(folder: Path, run: Path) -> list[str]:
    """Overrides that export the run into another folder."""
    return [f"output_dir={folder}", f"checkpoint.load={run.parent / 'run'}"]


def record_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "export.json").read_text())
    for name, described in record["files"].items():
        content = (folder / name).read_bytes()
        assert described == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name
    return record


def test_onnx_and_pt2_are_what_transformers_computes(run: Path, tmp_path: Path) -> None:
    """Of pt2 the export's own comparison with the run says so."""
    folder = run.parent / "run"
    for format in ("onnx", "pt2"):
        assert export(run, f"export.format={format}") == 0
        record = record_of(folder / format)
        assert set(record["largest_difference"]) == {"all tokens at once", "padding on the left", "token by token"}
        assert max(record["largest_difference"].values()) < 1e-5 and record["step"] == 1
    assert record["torch"] == torch.__version__
    assert set(record["files"]) == {"model.pt2", "config.json", "generation_config.json"}
    assert convert(["--to", "hf", "--input", str(folder), "--output", str(tmp_path / "hf")]) == 0
    ids = np.random.default_rng(0).integers(0, 101, (2, 24))
    with torch.no_grad():
        expected = GPT2LMHeadModel.from_pretrained(tmp_path / "hf")(torch.from_numpy(ids)).logits
    found = logits(folder / "onnx", None, ids)
    assert np.abs(found - expected.numpy()).max() < 1e-5


def test_mindspore_writes_the_same_onnx(run: Path, mindspore: ModuleType) -> None:
    files = []
    for backend in ("torch", "mindspore"):
        assert export(run, "export.format=onnx", f"backend={backend}") == 0
        files.append(record_of(run.parent / "run" / "onnx")["files"])
    assert files[0] == files[1]


def test_small_weights_gguf_and_no_cache(run: Path) -> None:
    folder = run.parent / "run"
    assert export(run, "export.format=onnx", "export.weights=int4", "export.cache=false") == 0
    record = record_of(folder / "onnx")
    assert (record["weights"], record["cache"]) == ("int4", False)
    assert set(record["largest_difference"]) == {"all tokens at once", "padding on the left"}
    assert 0.01 < max(record["noise"].values()) < record["allowed_noise"] == 0.5
    assert export(run, "export.format=gguf", "export.weights=int8") == 0
    record_of(folder / "gguf")
    tensors = gguf.GGUFReader(folder / "gguf" / "model.gguf").tensors
    assert {tensor.tensor_type.name for tensor in tensors} == {"F32", "Q8_0"}


def test_a_wrong_graph_gets_no_name(run, tmp_path, monkeypatch, capsys) -> None:
    """Wrong by a thousandth, not a number; and of float16 by a hundredth of each logit."""
    right = exports._logits
    words = into(tmp_path / "out", run)
    for dtype, change in (
        ("float32", lambda found: found + 1e-3),
        ("float32", lambda found: found * np.nan),
        ("float16", lambda found: found * 1.01),
        ("float16", lambda found: found * np.nan),
    ):
        monkeypatch.setattr(exports, "_logits", lambda *given, change=change: change(right(*given)))
        assert export(run, "export.format=onnx", f"export.weights={dtype}", *words) == 1
        assert "all tokens at once: its logits differ" in capsys.readouterr().err
        assert not (tmp_path / "out" / "onnx").exists()


@pytest.mark.parametrize("format", ["onnx", "gguf", "pt2", "safetensors"])
def test_an_export_is_replaced_if_asked_and_a_full_disk_leaves_nothing_half(run, tmp_path, capsys, format) -> None:
    """No file may grow beyond a limit: as on a full disk, but with "File too large"."""
    place = tmp_path / ("weights" if format == "safetensors" else format)
    place.mkdir()
    (place / "old").touch()
    words = [*into(tmp_path, run), f"export.format={format}", "export.check=false"]
    assert export(run, *words, "export.overwrite=false") == 2
    assert "an export is there; add export.overwrite=true" in capsys.readouterr().err
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert export(run, *words) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert f"{place}: the export could not be written: File too large; an older export" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", place.name]
    assert [path.name for path in place.iterdir()] == ["old"]


def test_a_scheduler_ends_an_export_without_remains(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(exports, "describe_files", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        export(run, "export.format=gguf", *into(tmp_path, run))
    assert ended.value.code == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_waits_for_the_end_of_torchs_writer(run, tmp_path, monkeypatch) -> None:
    """An exception in one of its writes could abort the process. What is left to write is not."""
    save, sizes = torch.export.save, []

    def interrupted(program: Any, file: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        save(program, file)
        file.flush()
        sizes.append(file.tell())

    monkeypatch.setattr(torch.export, "save", interrupted)
    assert export(run, "export.format=pt2", *into(tmp_path, run)) == 130
    assert sizes == [0]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_weights_of_8_bits_are_evaluated_on_integers(run: Path, tmp_path: Path, mindspore: ModuleType) -> None:
    """The loss is the float model's but for rounding; MindSpore rounds only the weights."""
    losses = []
    assert export(run, "export.format=safetensors", "export.weights=int8") == 0
    weights = "run/weights"
    for folder, backend in (("run", "torch"), (weights, "torch"), (weights, "mindspore")):
        words = ["--config", str(run), "--run_mode", "eval", f"output_dir={tmp_path}"]
        words += [f"checkpoint.load={run.parent / folder}", f"backend={backend}"]
        assert main(words) == 0
        losses.append(json.loads((tmp_path / "evaluation.json").read_text())["validation_loss"])
    expected, integers, rounded = losses
    assert 1e-7 < abs(integers - expected) < 1e-3
    assert 1e-7 < abs(rounded - expected) < 1e-3 and abs(rounded - integers) > 1e-7

"""One safetensors file out of parts of ranks: against the arrays they were cut from, and the library's own reading."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import safe_open
from safetensors.numpy import load_file

from common.backends import make_run
from common.checkpoint.folders import find_checkpoint
from common.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from common.checkpoint.writer import CheckpointWriter, Part, Snapshot
from common.config.load import build_config
from common.config.schema import RunConfig
from common.errors import CheckpointError
from common.resolve.derive import resolve_mode
from common.training.export import export
from common.training.opened_checkpoint import Checkpoint
from common.weights.names import parameter_shapes
from tests.tiny import tiny_run

ROOT = Path(__file__).resolve().parents[3]
LARGE = {"model__num_layers": 8, "model__hidden_size": 512}


def config_of(folder: Path, **more: Any) -> RunConfig:
    return resolve_mode(build_config(tiny_run(folder, export={"overwrite": True}, **more)), "export", world_size=1)


def to_export(folder: Path, **more: Any) -> Path:
    run, inputs = make_run(config_of(folder, **more), "export")
    assert inputs.checkpoint is not None
    export(run, inputs.checkpoint)
    return folder / "weights"


def value_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Different for each tensor, row and column, and a view of a vector: element (r, c) is its element r + c."""
    vector = np.arange(sum(shape), dtype=np.float32) + np.float32(sum(name.encode()) / 1000)
    return np.lib.stride_tricks.as_strided(vector, shape, [vector.itemsize] * len(shape))


def cut(shape: tuple[int, ...], rank: int) -> list[list[int]]:
    """Two uneven parts: of matrices by columns, but of the largest by rows; of vectors by elements."""
    dim = 0 if len(shape) == 1 or shape[0] > shape[1] else 1
    border = shape[dim] // 3
    spans = [[0, size] for size in shape]
    spans[dim] = [0, border] if rank == 0 else [border, shape[dim]]
    return spans


def write_parts(folder: Path, **sizes: Any) -> Path:
    """A checkpoint of two ranks in the run ``folder``."""
    config = config_of(folder, **sizes)
    shapes = parameter_shapes(config.model)
    engine = {"optimizer_steps": 7, "loss_scale": {}, "rng": {}}
    manifest = {"state": {"step": 7}, "engine": engine, "config": config.model_dump(), "tokenizer": None}
    writer = CheckpointWriter(folder / "checkpoints", asynchronous=False, active=False, patience=5)
    for rank in (1, 0):  # rank 0 waits for the others
        rectangles = {name: cut(shape, rank) for name, shape in shapes.items()}
        places = {name: tuple(slice(*span) for span in spans) for name, spans in rectangles.items()}
        tensors = {name: value_of(name, shape)[places[name]] for name, shape in shapes.items()}
        part = Part(rank=rank, ranks=2, rectangles=rectangles)
        files = {"model.safetensors": tensors, "optimizer.safetensors": {}}
        writer.save(Snapshot(files=files, manifest=manifest, part=part))
    found = find_checkpoint(folder)
    assert found is not None
    return found


def test_parts_become_the_file_of_one_rank(tmp_path: Path) -> None:
    checkpoint = write_parts(tmp_path)
    config, exported = config_of(tmp_path), to_export(tmp_path)
    found = load_file(exported / "model.safetensors")
    shapes = parameter_shapes(config.model)
    assert list(found) == list(shapes)
    for name, shape in shapes.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], value_of(name, shape))
    with safe_open(exported / "model.safetensors", "numpy") as reader:
        assert reader.metadata() == {"format": "pt"}
    before, after = read_manifest(checkpoint), read_manifest(exported)
    assert after.pop("exported_from") == str(checkpoint)
    assert list(after.pop("files")) == ["model.safetensors"] and len(before.pop("files")) == 4
    assert after == before
    # the folder is a checkpoint of weights
    assert find_checkpoint(exported) == exported
    for name, values in Checkpoint(exported).weights(config.model):
        np.testing.assert_array_equal(values, found[name])
    with pytest.raises(CheckpointError, match=r"without the state of the optimizer; .* checkpoint\.init_from="):
        next(iter(Checkpoint(exported).moments(config, 7)))
    # and may be exported again, over itself
    to_export(tmp_path, checkpoint={"load": str(exported)})
    assert load_file(exported / "model.safetensors").keys() == found.keys()


_COMMAND = """
import re, sys
from pathlib import Path
sys.modules |= {"torch": None, "mindspore": None, "deepspeed": None}  # cannot be imported
import run_gpt2
from common.weights.pieces import ShardedReader

seen, read = [], ShardedReader.read

def look():
    seen.append(int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)

def watched(*words):
    look()
    values = read(*words)
    look()
    return values

ShardedReader.read = watched
code = run_gpt2.main(sys.argv[1:])
print(max(seen) - seen[0])
sys.exit(code)
"""


def test_the_command_takes_memory_of_a_few_tensors_and_no_framework(tmp_path: Path) -> None:
    """Weights of 101 MB. Only anonymous memory counts: pages of mapped files are the kernel's."""
    write_parts(tmp_path, **LARGE)
    config = tmp_path / "run.json"  # JSON is YAML
    config.write_text(json.dumps(tiny_run(tmp_path, export={"overwrite": True}, **LARGE)))
    words = [sys.executable, "-c", _COMMAND, "--config", str(config), "--run_mode", "export"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exported = tmp_path / "weights" / "model.safetensors"
    largest = 4 * 4 * 512 * 512
    assert exported.stat().st_size > 23 * largest
    assert 0 < int(done.stdout.split()[-1]) < 4 * largest
    with safe_open(exported, "numpy") as reader:
        for name, shape in parameter_shapes(config_of(tmp_path, **LARGE).model).items():
            np.testing.assert_array_equal(reader.get_tensor(name), value_of(name, shape))
    said = r"weights/model\.safetensors: 132 tensors, 10\d\.\d MB, of .*step_00000007, step 7"
    assert re.search(said, done.stderr + done.stdout)


def test_all_that_is_missing_or_too_much_is_named(tmp_path: Path) -> None:
    checkpoint = write_parts(tmp_path)
    manifest = json.loads((checkpoint / MANIFEST).read_text())

    def require(message: str) -> None:
        write_manifest(checkpoint, manifest)
        with pytest.raises(CheckpointError, match=message):
            to_export(tmp_path)

    lost = manifest["files"].pop("model.rank_00001.safetensors")
    require(
        r"does not fit the model: of wte\.weight \[101, 32\] only 1056 elements are there.*"
        r"and 30 more\. Use another checkpoint: a rank's part is lost"
    )
    manifest["files"]["model.rank_00001.safetensors"] = lost
    # a tensor in a rank's file that the manifest does not know
    for file in manifest["files"].values():
        file.get("pieces", {}).pop("ln_f.bias", None)
    require(r"ln_f\.bias is \[22\], the model's is \[32\]")
    said = r"num_layers is 2 there and 3 in the config\. To use it, add: model=from_checkpoint, or model\.num_layers=2$"
    with pytest.raises(CheckpointError, match=said):
        to_export(tmp_path, model__num_layers=3)
    assert not (tmp_path / "weights").exists()


def test_a_tokenizer_goes_along_by_the_names_of_a_folder(tmp_path, caplog) -> None:
    write_parts(tmp_path)
    folder, gone = tmp_path / "vocabulary", tmp_path / "gone"
    folder.mkdir()
    beside = ("added_tokens.json", "tokenizer_config.json", "generation_config.json")
    for name in ("encoder.json", "vocab.bpe", "other.txt", *beside):
        (folder / name).write_text(f"content of {name}")
    here = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"} | {name: name for name in beside}
    files = {"vocab_file": str(folder / "encoder.json"), "merge_file": str(folder / "vocab.bpe")}
    prompts = {"prompt": ["a"], "output_folder": "texts", "top_k": 5, "strategy": "sampling"}
    for wish, names in (({"folder": str(folder)}, here), (files, here), ({"folder": str(gone)}, {})):
        to_export(tmp_path, data={"tokenizer": wish}, predict=prompts)
        found = {path.name: path.read_text(errors="replace") for path in (tmp_path / "weights").iterdir()}
        settings = yaml.safe_load(found.pop("model.yaml"))
        assert found.keys() == {"manifest.json", "model.safetensors", *names}
        assert [found[name] for name in names] == [f"content of {source}" for source in names.values()]
        assert ("tokenizer" in settings.get("data", {})) == bool(names)
        assert settings["predict"]["top_k"] == 5
        assert not settings["predict"].keys() & {"prompt", "output_folder"}
    assert f"{gone} is not there; the export holds no tokenizer" in caplog.text


def test_a_checkpoint_to_resume_is_not_the_one_exported(tmp_path, caplog) -> None:
    checkpoint = write_parts(tmp_path)
    to_export(tmp_path, checkpoint={"resume": "latest"})
    assert "is for training" not in caplog.text
    to_export(tmp_path, checkpoint={"resume": "elsewhere"})
    assert f"checkpoint.resume=elsewhere is for training; the weights are those of {checkpoint}" in caplog.text

"""MindIR files against torch, against our generation in a process without this project, and on disks that refuse."""

import tests.needs_both  # noqa: F401

# isort: split
import errno
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file

import mindformers_gpt2.export
from common.backends import make_run
from common.checkpoint.folders import require_checkpoint
from common.checkpoint.manifest import read_manifest, write_manifest
from common.config.load import build_config
from common.errors import ConfigError, RunError, StorageError
from common.parallel.run import Run
from common.parallel.sharding import padded_shapes
from common.resolve.derive import resolve_config
from common.run_folder import owned_folder
from common.tensor_files.safetensors_file import write_safetensors
from gpt2_toolkit import LanguageModel, load_model
from tests.reference import hugging_face_model
from tests.tiny import tiny_run, train_here

VOCABULARY, WINDOW, POSITIONS = 101, 16, 20


def make_tree(folder: Path, corpus: Path | None = None, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"backend": "mindspore", "model__max_positions": POSITIONS, "export__overwrite": True}
    return tiny_run(folder, corpus, **(usual | {"train__max_steps": 1} | changes))


def make_config(folder: Path) -> Run:
    return resolve_config(build_config(make_tree(folder)))


def export(folder: Path, **changes: Any) -> None:
    mindformers_gpt2.export.export(*make_run(build_config(make_tree(folder, **changes)), "export"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    """A checkpoint of torch with weights that are large enough to be seen; MindSpore would refuse its path."""
    folder = tmp_path_factory.mktemp("export") / "ein Lauf 跑"
    train_here(make_tree(folder, corpus_prefix, backend="torch"))
    checkpoint, random = require_checkpoint(folder, "test"), np.random.default_rng(0)
    file, manifest = checkpoint / "model.safetensors", read_manifest(checkpoint)
    weights = {}
    for name, values in load_file(file).items():
        deviation = 1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.2
        weights[name] = random.normal(0, deviation, values.shape).astype(np.float32)
    crc32 = write_safetensors(file, weights)
    manifest["files"][file.name] = {"crc32": crc32, "bytes": file.stat().st_size}
    write_manifest(checkpoint, manifest)
    return folder


@pytest.fixture(scope="module")
def exported(run_folder: Path) -> Path:
    export(run_folder)
    return run_folder / "export"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"w{number}" for number in range(VOCABULARY - len(marks))]
    (folder / "vocab.txt").write_text("\n".join([*marks, *words]))
    return folder


@pytest.fixture(scope="module")
def model(run_folder: Path, tokenizer: Path) -> LanguageModel:
    return load_model(run_folder, backend="torch", device="cpu", tokenizer=tokenizer)


def torch_logits(run_folder: Path, ids: Any) -> Any:
    config, checkpoint = make_config(run_folder).model, require_checkpoint(run_folder, "test")
    with torch.no_grad():
        net = hugging_face_model(config, load_torch_file(checkpoint / "model.safetensors"))
        return net(torch.from_numpy(ids).long()).logits.numpy()


def fingerprints(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def random_ids(batch: int, length: int) -> Any:
    return np.random.default_rng(batch).integers(0, VOCABULARY, (batch, length)).astype(np.int32)


def test_logits_are_those_of_torch_for_any_batch_and_length(run_folder: Path, exported: Path) -> None:
    """float32: 1e-5 at logits of about 10."""
    loaded = ms.nn.GraphCell(ms.load(str(exported / "model.mindir")))
    for batch, length in ((1, WINDOW), (5, 3), (2, POSITIONS), (1, 1), (5, WINDOW)):
        ids = random_ids(batch, length)
        found, expected = loaded(ms.Tensor(ids)).asnumpy(), torch_logits(run_folder, ids)
        assert found.shape == (batch, length, VOCABULARY) and found.dtype == np.float32
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    record, files = json.loads((exported / "export.json").read_text()), fingerprints(exported)
    del files["export.json"]
    assert {name: file["sha256"] for name, file in record["files"].items()} == files
    assert record["checkpoint"] == str(run_folder / "checkpoints" / "step_00000001")
    assert record["model"] == make_config(run_folder).model.model_dump()
    assert record["mindspore"] == ms.__version__ and set(record["dynamic"]) == {"batch", "length"}
    modes = {path.stat().st_mode & 0o777 for path in exported.iterdir()}
    assert len(modes) == 1  # as the umask has it, export.json as well as MindSpore's


GENERATE = """
import json, sys
import numpy as np, mindspore as ms
folder, batches, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
graph = json.load(open(folder + "/export.json"))["graphs"]["decode"]
inputs = {each["name"]: each for each in graph["inputs"]}
assert list(inputs) == ["token", "position", "keys", "values"]
decode = ms.nn.GraphCell(ms.load(folder + "/" + graph["file"]))
answers = []
for rows in batches:
    ids = np.array(rows, np.int32)
    shape = [len(rows) if size == "batch" else size for size in inputs["keys"]["shape"]]
    keys = values = ms.Tensor(np.zeros(shape, inputs["keys"]["dtype"]))
    prompt = ids.shape[1]
    for position in range(prompt + steps - 1):
        at = ms.Tensor(np.full(len(rows), position, np.int32))
        logits, keys, values = decode(ms.Tensor(ids[:, position : position + 1]), at, keys, values)
        assert list(keys.shape) == shape
        if position >= prompt - 1:
            ids = np.concatenate([ids, logits.asnumpy().argmax(-1).astype(np.int32)[:, None]], 1)
    answers.append(ids[:, prompt:].tolist())
assert not {"common", "mindformers_gpt2", "torch"} & set(sys.modules)
print(json.dumps(answers))
"""


def test_a_process_without_this_project_generates_the_same_tokens(
    exported: Path, model: LanguageModel, tmp_path: Path
) -> None:
    """Three prompts at once, then one, then two: each equals what torch generates for it alone."""
    batches = [[[5, 9, 2], [7, 100, 0], [33, 33, 34]], [[3]], [[61, 1, 1, 8, 2], [5, 4, 3, 2, 1]]]
    words = [sys.executable, "-I", "-c", GENERATE, str(exported), json.dumps(batches), "12"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    settings = {"max_new_tokens": 12, "stop_at_end_of_text": False}
    expected = [[model.generate([row], **settings)[0].tokens for row in rows] for rows in batches]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert len({tuple(row) for rows in expected for row in rows}) == 6, "no two alike"
    assert len(set(expected[1][0])) > 3


def test_load_model_runs_it(exported: Path, tokenizer: Path, model: LanguageModel) -> None:
    """Runs as on torch: greedy, beams, past the positions, and scores."""
    program = load_model(exported, device="cpu", tokenizer=tokenizer)
    assert program.backend == "mindspore"
    rows = [[5, 9, 2, 8], [3], [33, 33, 34]]
    for settings in (
        {"max_new_tokens": 12},
        {"max_new_tokens": 6, "strategy": "beam_search", "num_beams": 2},
        {"max_new_tokens": POSITIONS + 4, "window": 8},
    ):
        found, wanted = (
            [each.tokens for each in one.generate(rows, stop_at_end_of_text=False, **settings)]
            for one in (program, model)
        )
        assert found == wanted and len({tuple(row) for row in found}) == 3
    scores = [one.score_ids([[7, *rows[0]], rows[2]], [1, 2]) for one in (program, model)]
    for found, wanted in zip(*scores, strict=True):
        # float32 added in another order, of log-probabilities of up to 20
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert found.greedy.tolist() == wanted.greedy.tolist()


@pytest.mark.long
def test_float16_of_a_fixed_batch_in_two_parts_from_pynative(
    run_folder: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16 against torch in float32: 1 % of the largest logit. Above 1 GB, here above 0, weights lie apart."""
    monkeypatch.setattr("mindspore.train.serialization.TOTAL_SAVE", 0)
    other = run_folder.parent / "half"
    types = dict.fromkeys(("parameters", "compute", "softmax", "layer_norm"), "float16")
    words = {"checkpoint__load": str(run_folder), "context__mode": "pynative"}
    export(other, **words, precision=types, export__batch_size=2)
    record = json.loads((other / "export" / "export.json").read_text())
    assert set(record["files"]) == {
        f"{name}_{part}" for name in ("model", "decode") for part in ("graph.mindir", "variables/data_0")
    }
    keys = {"name": "keys", "shape": [2, 2, 4, POSITIONS, 8], "dtype": "float16"}
    assert record["graphs"]["decode"]["inputs"][2] == keys
    assert list(record["dynamic"]) == ["length"]
    weights = sum(map(np.prod, padded_shapes(make_config(run_folder)).values()))
    assert record["files"]["model_variables/data_0"]["bytes"] < 2.2 * weights
    loaded = ms.nn.GraphCell(ms.load(str(other / "export" / "model_graph.mindir")))
    ids = random_ids(2, 9)
    found, expected = loaded(ms.Tensor(ids)).asnumpy(), torch_logits(run_folder, ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.01 * np.abs(expected).max())
    with pytest.raises(Exception, match=r"shape|input"):
        loaded(ms.Tensor(random_ids(3, 9))).asnumpy()


def test_a_failed_export_leaves_the_old_one(
    tmp_path: Path, run_folder: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, and 1e-4 on one bias while MindSpore writes."""
    shutil.copytree(exported, tmp_path / "export")
    before, true_export = fingerprints(tmp_path / "export"), ms.export

    def full(*_: Any, **words: Any) -> None:
        Path(words["file_name"] + ".mindir").write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    def disturbed(cell: Any, *inputs: Any, **words: Any) -> None:
        bias = cell.model.ln_f.bias
        before = bias.asnumpy().copy()
        ms.ops.assign(bias, ms.Tensor(before + np.float32(1e-4) * (np.arange(32) == 3)))
        true_export(cell, *inputs, **words)
        ms.ops.assign(bias, ms.Tensor(before))

    for write, error, message in (
        (full, StorageError, "No space left on device; an older export is untouched"),
        (disturbed, RunError, r"model\.mindir: .*differs from the model by .*nothing was exported"),
    ):
        monkeypatch.setattr(ms, "export", write)
        with pytest.raises(error, match=message):
            export(tmp_path, checkpoint__load=str(run_folder), context__mode="pynative")
        assert fingerprints(tmp_path / "export") == before
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "export"]
    with owned_folder(tmp_path), pytest.raises(ConfigError, match="another run is writing here"):
        export(tmp_path, checkpoint__load=str(run_folder))

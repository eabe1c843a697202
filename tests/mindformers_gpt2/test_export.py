"""MindIR files against torch, against our own generation in a process without this project, and on
disks that refuse.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("GLOG_v", "3")
ms = pytest.importorskip(
    "mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'"
)
torch = pytest.importorskip("torch")
from safetensors.numpy import load_file  # noqa: E402

import mindformers_gpt2.checkpoint  # noqa: E402
import mindformers_gpt2.device  # noqa: E402
import mindformers_gpt2.export  # noqa: E402
import mindformers_gpt2.model  # noqa: E402
import mindformers_gpt2.predict  # noqa: E402
import torch_gpt2.checkpoint  # noqa: E402
import torch_gpt2.device  # noqa: E402
import torch_gpt2.model  # noqa: E402
from common.checkpoint.folders import require_checkpoint  # noqa: E402
from common.checkpoint.manifest import write_manifest  # noqa: E402
from common.config.load import build_config  # noqa: E402
from common.config.schema import PredictConfig  # noqa: E402
from common.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    GPT2Error,
    RunError,
    StorageError,
)
from common.generation.generate import generate  # noqa: E402
from common.generation.prompts import Prompt  # noqa: E402
from common.inputs import make_run  # noqa: E402
from common.parallel.run import Run  # noqa: E402
from common.resolve.derive import resolve_config  # noqa: E402
from common.run_folder import owned_folder  # noqa: E402
from common.tensor_files.safetensors_file import write_safetensors  # noqa: E402
from common.training.opened_checkpoint import Checkpoint  # noqa: E402
from gpt2_toolkit import load_model  # noqa: E402
from tests.tiny import tiny_run, train_here  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, WINDOW, POSITIONS = 101, 16, 20


def make_tree(folder: Path, corpus: Path | None = None, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "backend": "mindspore",
        "model__max_positions": POSITIONS,
        "train": {"max_steps": 1, "micro_batch_size": 2, "global_batch_size": 2},
        "optimizer": {"learning_rate": 0.1},
        "export": {"overwrite": True},
    }
    return tiny_run(folder, corpus, **(usual | changes))


def make_config(folder: Path, **changes: Any) -> Run:
    return resolve_config(build_config(make_tree(folder, **changes)))


def export(folder: Path, **changes: Any) -> None:
    run = make_run(build_config(make_tree(folder, **changes)), "export")
    mindformers_gpt2.export.export(*run)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, corpus_prefix: Path) -> Path:
    """A checkpoint of torch, every weight then drawn again so that no part is too small to be seen;
    MindSpore would refuse its path.
    """
    folder = tmp_path_factory.mktemp("export") / "ein Lauf 跑"
    train_here(make_tree(folder, corpus_prefix, backend="torch"))
    checkpoint, random = require_checkpoint(folder, "test"), np.random.default_rng(0)
    file, manifest = (
        checkpoint / "model.safetensors",
        json.loads((checkpoint / "manifest.json").read_text()),
    )
    deviation = {
        name: 1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.2
        for name in load_file(file)
    }
    weights = {
        name: random.normal(0, deviation[name], values.shape).astype(np.float32)
        for name, values in load_file(file).items()
    }
    manifest["files"][file.name] = {
        "crc32": write_safetensors(file, weights),
        "bytes": file.stat().st_size,
    }
    write_manifest(checkpoint, manifest)
    return folder


@pytest.fixture(scope="module")
def exported(run_folder: Path) -> Path:
    export(run_folder)
    return run_folder / "export"


def torch_logits(run_folder: Path, ids: Any) -> Any:
    config = make_config(run_folder)
    model = torch_gpt2.model.build_model(config, torch_gpt2.device.select_device("cpu"))
    torch_gpt2.checkpoint.load_weights(
        dict(model.named_parameters()),
        config.model,
        Checkpoint(require_checkpoint(run_folder, "test")),
    )
    with torch.no_grad():
        hidden = model(torch.from_numpy(ids).long())
        return model.logits(hidden).float().numpy()


def fingerprints(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def random_ids(batch: int, length: int) -> Any:
    return np.random.default_rng(batch).integers(0, VOCABULARY, (batch, length)).astype(np.int32)


def test_logits_are_those_of_torch_for_any_batch_and_length(
    run_folder: Path, exported: Path
) -> None:
    """float32: 1e-5 at logits of about 10."""
    loaded = ms.nn.GraphCell(ms.load(str(exported / "model.mindir")))
    for batch, length in ((1, WINDOW), (5, 3), (2, POSITIONS), (1, 1), (5, WINDOW)):
        ids = random_ids(batch, length)
        found, expected = loaded(ms.Tensor(ids)).asnumpy(), torch_logits(run_folder, ids)
        assert found.shape == (batch, length, VOCABULARY) and found.dtype == np.float32
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


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
    run_folder: Path, exported: Path, tmp_path: Path
) -> None:
    """Three prompts at once, then one, then two: each equals what our own generation gives for
    that prompt.
    """
    config = make_config(run_folder)
    model = mindformers_gpt2.model.build_model(config, mindformers_gpt2.device.select_device("cpu"))
    parameters = {parameter.name: parameter for parameter in model.get_parameters()}
    mindformers_gpt2.checkpoint.load_weights(
        parameters, config.model, Checkpoint(require_checkpoint(run_folder, "test"))
    )
    batches = [[[5, 9, 2], [7, 100, 0], [33, 33, 34]], [[3]], [[61, 1, 1, 8, 2], [5, 4, 3, 2, 1]]]
    done = subprocess.run(
        [sys.executable, "-I", "-c", GENERATE, str(exported), json.dumps(batches), "12"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    decoder = mindformers_gpt2.predict.Decoder(
        model, mindformers_gpt2.device.select_device("cpu"), 1
    )
    prompts = [Prompt(text="", ids=row, new_tokens=12) for rows in batches for row in rows]
    found = iter(
        [each.tokens for each in generate(decoder, prompts, PredictConfig(), seed=0, ends=())]
    )
    expected = [[next(found) for _ in rows] for rows in batches]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    # no two alike, none of one token
    assert (
        len({tuple(row) for rows in expected for row in rows}) == 6 and len(set(expected[1][0])) > 3
    )


def test_load_model_runs_it(run_folder: Path, exported: Path, tmp_path: Path) -> None:
    """Runs as on torch: greedy, beams, past the positions, and scores."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"w{number}" for number in range(VOCABULARY - len(marks))]
    (tmp_path / "vocab.txt").write_text("\n".join([*marks, *words]))
    program, model = (
        load_model(path, backend=backend, device="cpu", tokenizer=tmp_path)
        for path, backend in ((exported, "auto"), (run_folder, "torch"))
    )
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


def test_the_record_says_what_is_there(run_folder: Path, exported: Path) -> None:
    record = json.loads((exported / "export.json").read_text())
    found = fingerprints(exported)
    del found["export.json"]
    assert {name: file["sha256"] for name, file in record["files"].items()} == found
    assert all(
        file["bytes"] == (exported / name).stat().st_size for name, file in record["files"].items()
    )
    assert record["checkpoint"] == str(run_folder / "checkpoints" / "step_00000001")
    assert record["model"] == make_config(run_folder).model.model_dump()
    assert record["mindspore"] == ms.__version__ and set(record["dynamic"]) == {"batch", "length"}
    assert all(0 <= graph["max_abs_difference"] <= 1e-6 for graph in record["graphs"].values())
    modes = {path.stat().st_mode & 0o777 for path in exported.iterdir()}
    assert len(modes) == 1  # as the umask has it, export.json as well as MindSpore's


def test_float16_of_a_fixed_batch_in_two_parts_from_pynative(
    run_folder: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and products in float16 against torch in float32: 1 % of the largest logit. Above 1
    GB, here above 0, weights lie apart.
    """
    monkeypatch.setattr("mindspore.train.serialization.TOTAL_SAVE", 0)
    other = run_folder.parent / "half"
    types = dict.fromkeys(("parameters", "compute", "softmax", "layer_norm"), "float16")
    export(
        other,
        checkpoint__load=str(run_folder),
        precision=types,
        export__batch_size=2,
        context__mode="pynative",
    )
    record = json.loads((other / "export" / "export.json").read_text())
    assert {
        "model_graph.mindir",
        "model_variables/data_0",
        "decode_graph.mindir",
        "decode_variables/data_0",
    } == set(record["files"])
    assert record["graphs"]["decode"]["inputs"][2] == {
        "name": "keys",
        "shape": [2, 2, 4, POSITIONS, 8],
        "dtype": "float16",
    }
    assert list(record["dynamic"]) == ["length"]
    weights = sum(parameter.numel() for parameter in build_torch(run_folder).parameters())
    assert record["files"]["model_variables/data_0"]["bytes"] < 2.2 * weights
    loaded, ids = (
        ms.nn.GraphCell(ms.load(str(other / "export" / "model_graph.mindir"))),
        random_ids(2, 9),
    )
    expected = torch_logits(run_folder, ids)
    np.testing.assert_allclose(
        loaded(ms.Tensor(ids)).asnumpy(), expected, rtol=0, atol=0.01 * np.abs(expected).max()
    )
    with pytest.raises(Exception, match=r"shape|input"):
        loaded(ms.Tensor(random_ids(3, 9))).asnumpy()


def build_torch(run_folder: Path) -> Any:
    return torch_gpt2.model.build_model(
        make_config(run_folder), torch_gpt2.device.select_device("cpu")
    )


def test_without_a_checkpoint_or_with_another_vocabulary(tmp_path: Path, run_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no whole checkpoint here .*checkpoint\.load"):
        export(tmp_path / "none")
    with pytest.raises(
        CheckpointError,
        match=r"vocab_size is 101 there and 90 in the config\. To use it, add:"
        r" model=from_checkpoint, or model\.vocab_size=101$",
    ):
        export(tmp_path, checkpoint__load=str(run_folder), model__vocab_size=90)


def test_on_a_full_disk_the_old_export_stays(
    tmp_path: Path, run_folder: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills while MindSpore writes, and while the folders change names; and an export
    killed between two renames is put back.
    """
    shutil.copytree(exported, tmp_path / "export")
    load = {"checkpoint__load": str(run_folder)}
    before = fingerprints(tmp_path / "export")

    def full(*_: Any, **words: Any) -> None:
        Path(words["file_name"] + ".mindir").write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    def refused(error: type[GPT2Error]) -> None:
        with pytest.raises(error, match="No space left on device; an older export is untouched"):
            export(tmp_path, **load)
        assert fingerprints(tmp_path / "export") == before
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "export"]

    with monkeypatch.context() as patch:
        patch.setattr(ms, "export", full)
        refused(StorageError)
        (tmp_path / "export").rename(tmp_path / ".export.replaced.tmp")
        (tmp_path / ".export.tmp" / "part").mkdir(parents=True)
        refused(StorageError)
    replace = os.replace

    def not_the_new_one(source: Path, target: Path) -> None:
        if Path(source).name == ".export.tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    def quick(*_: Any, **words: Any) -> None:
        Path(words["file_name"] + ".mindir").write_bytes(b"whole")

    monkeypatch.setattr(ms, "export", quick)
    monkeypatch.setattr(mindformers_gpt2.export, "_check", lambda *_: 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", not_the_new_one)
        refused(StorageError)
    export(tmp_path, **load)
    assert (tmp_path / "export" / "model.mindir").read_bytes() == b"whole" and len(
        list(tmp_path.iterdir())
    ) == 2


def test_folders_that_cannot_be_used(tmp_path: Path, run_folder: Path) -> None:
    load = {"checkpoint__load": str(run_folder)}
    with owned_folder(tmp_path), pytest.raises(ConfigError, match="another run is writing here"):
        export(tmp_path, **load)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        export(tmp_path / "file", **load)


def test_a_file_that_differs_from_the_model_is_refused(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e-4 on one bias while MindSpore writes."""
    true_export = ms.export

    def disturbed(cell: Any, *inputs: Any, **words: Any) -> None:
        bias = cell.model.ln_f.bias
        before = bias.asnumpy().copy()
        ms.ops.assign(bias, ms.Tensor(before + np.float32(1e-4) * (np.arange(32) == 3)))
        true_export(cell, *inputs, **words)
        ms.ops.assign(bias, ms.Tensor(before))

    monkeypatch.setattr(ms, "export", disturbed)
    with pytest.raises(
        RunError, match=r"model\.mindir: .*differs from the model by .*nothing was exported"
    ):
        export(tmp_path, checkpoint__load=str(run_folder), context__mode="pynative")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]

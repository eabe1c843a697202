"""OneFlow-Benchmark's snapshots, written here by its own rules out of transformers' weights, with
meta files as google's protobuf prints its messages.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.conversion.convert import convert  # noqa: E402
from common.systems.table import FORMATS, detect  # noqa: E402
from tests.common.systems.tiny_weights import refused  # noqa: E402

LAYERS, WIDTH, HEADS, POSITIONS, VOCABULARY, ROWS = 2, 12, 3, 7, 13, 16
SIZES = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_heads": HEADS, "seq_length": POSITIONS}
TYPES = {"float32": "kFloat", "float64": "kDouble", "int64": "kInt64"}


def save(snapshot: Path, name: str, array: np.ndarray) -> None:
    (snapshot / name).mkdir(parents=True)
    (snapshot / name / "out").write_bytes(array.tobytes())
    dims = "".join(f"  dim: {size}\n" for size in array.shape)
    meta = f"shape {{\n{dims}}}\ndata_type: {TYPES[array.dtype.name]}\n"
    (snapshot / name / "meta").write_text(meta)


def by_head(array: np.ndarray) -> np.ndarray:
    """Order the columns of c_attn as OneFlow has them: q, k and v of each head in turn."""
    parts = array.reshape(*array.shape[:-1], 3, HEADS, WIDTH // HEADS)
    return np.ascontiguousarray(np.swapaxes(parts, -3, -2)).reshape(array.shape)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
    )
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval()


def in_oneflow(model: Any) -> dict[str, np.ndarray]:
    """Return transformers' weights as OneFlow's variables; both have (in, out)."""
    found = {}
    for name, tensor in model.transformer.state_dict().items():
        array = tensor.numpy()
        if "c_attn" in name:
            array = by_head(array)
        if name == "wte.weight":
            array = np.concatenate([array, np.zeros((ROWS - VOCABULARY, WIDTH), np.float32)])
        name = re.sub(r"ln_(\w)\.weight", r"layernorm_\1-gamma", name)
        name = re.sub(r"ln_(\w)\.bias", r"layernorm_\1-beta", name)
        name = re.sub(r"^(wte|wpe)\.weight", r"\1", name)
        found["model-" + re.sub(r"^h\.", "h", name).replace(".", "-")] = array
    return found


@pytest.fixture
def snapshot(tmp_path: Path, model: Any) -> Path:
    """A run's, with moments that are 2 and 3 times the weights."""
    snapshot = tmp_path / "save" / "iter30_snapshot"
    for name, array in in_oneflow(model).items():
        for end, times in (("", 1), ("-m", 2), ("-v", 3)):
            save(snapshot, name + end, times * array)
    save(snapshot, "System-Train-TrainStep-train", np.array([30], np.int64))
    scale = "System-Train-DynamicLossScale-train"
    save(snapshot, f"{scale}-LossScale", np.array([2.0**32], np.float32))
    save(snapshot, f"{scale}-GoodStepCounter", np.array([12], np.int64))
    (snapshot / "snapshot_done").touch()
    (snapshot.parent / "model.yaml").write_text(f"model: {SIZES | {'vocab_size': VOCABULARY}}")
    return snapshot


def test_the_logits_are_those_of_transformers(snapshot: Path, tmp_path: Path, model: Any) -> None:
    """Every weight is there bit for bit, so that the logits are equal too."""
    assert detect(snapshot.parent) == "oneflow"
    result = convert(snapshot.parent, tmp_path / "hf", target_format="hf", verify=True)
    assert result["ignored"]["model-wte[13:16]"] == "rows that pad the vocabulary"
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        ids = torch.arange(POSITIONS)[None]
        assert torch.equal(found(ids).logits, model(ids).logits)


@pytest.mark.parametrize("has_meta", [True, False])
def test_a_whole_run(snapshot: Path, has_meta: bool) -> None:
    """Moments, step and loss scale; OneFlow's first releases wrote no meta."""
    for file in () if has_meta else snapshot.glob("model-*/meta"):
        file.unlink()
    found = FORMATS["oneflow"].open(snapshot)
    run = found.run
    for part, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
        for name, weight in found.tensors.items():
            moment = found.moments[f"{name}.{part}"].load()
            np.testing.assert_array_equal(moment, factor * weight.load(), err_msg=name)
    assert run is not None and run["config"]["optimizer"]["name"] == "adamw"
    assert run["state"]["step"] == run["engine"]["optimizer_steps"] == 30
    scale = {"mode": "dynamic", "value": 2.0**32, "finite_steps": 12, "overflows": 0}
    assert run["engine"]["loss_scale"] == scale
    assert "reads from the first sample" in found.ignored["position in the data"]


def test_the_last_snapshot_is_taken(snapshot: Path) -> None:
    for other, step in (("iter9_snapshot", 9), ("iter100_snapshot", 100), ("last_snapshot", 7)):
        shutil.copytree(snapshot, snapshot.parent / other)
        file = snapshot.parent / other / "System-Train-TrainStep-train" / "out"
        file.write_bytes(np.int64(step).tobytes())
    found = FORMATS["oneflow"].open(snapshot.parent)
    assert found.run is not None and found.run["state"]["step"] == 100


def with_file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


BAD: dict[str, Callable[[Path], object]] = {
    "missing model-h1-layernorm_2-beta-m": lambda folder: shutil.rmtree(folder / "model-h1-layernorm_2-beta-m"),
    "model-wpe/out: has 332 bytes, and float32 .7, 12. takes 336; copy it again":
        with_file("model-wpe/out", bytes(332)),
    "model-wpe/meta: no shape and data_type": with_file("model-wpe/meta", b"shape { dim: -1 }"),
    "System-Train-TrainStep-train/out: is neither a count": with_file("System-Train-TrainStep-train/out", b"\xff" * 8),
    "System-Train-TrainStep-train/out: is neither a count nor a scale; copy":
        with_file("System-Train-TrainStep-train/meta", b"shape {" + b" dim: 1" * 40 + b" } data_type: kDouble"),
    "unexpected model-lm_head": lambda folder: save(folder, "model-lm_head", np.zeros(3, np.float32)),
    "model.yaml: no such file": lambda folder: (folder.parent / "model.yaml").unlink(),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_error(snapshot: Path, capsys: Any, message: str) -> None:
    BAD[message](snapshot)
    refused(capsys, snapshot.parent, message)

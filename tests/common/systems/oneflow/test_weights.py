"""OneFlow-Benchmark's snapshots, written here by its own rules out of transformers' weights, with
meta files of google's protobuf.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("google.protobuf")

from google.protobuf import (  # noqa: E402
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
)

from common.conversion.convert import convert  # noqa: E402
from common.systems.table import FORMATS, detect  # noqa: E402
from tests.common.systems.tiny_weights import refused  # noqa: E402

LAYERS, WIDTH, HEADS, POSITIONS, VOCABULARY, ROWS = 2, 12, 3, 7, 13, 16
SECTION = (
    f"{{num_layers: {LAYERS}, hidden_size: {WIDTH}, num_heads: {HEADS}, seq_length: {POSITIONS},"
    f" vocab_size: {VOCABULARY}}}"
)
TYPES = {"float32": 2, "float64": 3, "int64": 6}
RENAMED = {
    "ln_1.weight": "layernorm_1-gamma", "ln_1.bias": "layernorm_1-beta",
    "ln_2.weight": "layernorm_2-gamma", "ln_2.bias": "layernorm_2-beta",
}  # fmt: skip


def meta_class() -> Any:
    """Return the message VariableMetaInfo, with the numbers of oneflow's .proto files."""
    file = descriptor_pb2.FileDescriptorProto(name="meta.proto", package="oneflow", syntax="proto2")
    kinds = file.enum_type.add(name="DataType")
    for word, number in (("kInvalidDataType", 0), ("kFloat", 2), ("kDouble", 3), ("kInt64", 6)):
        kinds.value.add(name=word, number=number)
    shape = file.message_type.add(name="ShapeProto")
    shape.field.add(name="dim", number=1, label=3, type=3)
    info = file.message_type.add(name="VariableMetaInfo")
    info.field.add(name="shape", number=2, label=1, type=11, type_name=".oneflow.ShapeProto")
    info.field.add(name="data_type", number=3, label=1, type=14, type_name=".oneflow.DataType")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("oneflow.VariableMetaInfo"))


META = meta_class()


def save(snapshot: Path, name: str, array: np.ndarray) -> None:
    (snapshot / name).mkdir(parents=True)
    (snapshot / name / "out").write_bytes(array.tobytes())
    meta = META(data_type=TYPES[array.dtype.name])
    meta.shape.dim[:] = array.shape
    (snapshot / name / "meta").write_text(text_format.MessageToString(meta))


def tiny_gpt2() -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
    )
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.eval()


def by_head(array: np.ndarray) -> np.ndarray:
    """Order the columns of c_attn as OneFlow has them: q, k and v of each head in turn."""
    parts = array.reshape(*array.shape[:-1], 3, HEADS, WIDTH // HEADS)
    return np.ascontiguousarray(np.swapaxes(parts, -3, -2)).reshape(array.shape)


def in_oneflow(model: Any) -> dict[str, np.ndarray]:
    """Return transformers' weights as OneFlow's variables; both have (in, out)."""
    found = {}
    for name, tensor in model.transformer.state_dict().items():
        array = tensor.numpy()
        if "c_attn" in name:
            array = by_head(array)
        if name == "wte.weight":
            array = np.concatenate([array, np.zeros((ROWS - VOCABULARY, WIDTH), np.float32)])
        name = name.removesuffix(".weight") if name[:3] in ("wte", "wpe") else name
        name = name.replace("ln_f.weight", "layernorm_f-gamma")
        name = name.replace("ln_f.bias", "layernorm_f-beta")
        for theirs, oneflows in RENAMED.items():
            name = name.replace(theirs, oneflows)
        found["model-" + name.replace("h.", "h", 1).replace(".", "-")] = array
    return found


def snapshot_of(folder: Path, *, step: int = 30, run: bool = True) -> Path:
    """Write a snapshot, and with ``run`` moments that are 2 and 3 times the weights."""
    snapshot = folder / f"iter{step}_snapshot"
    for name, array in in_oneflow(tiny_gpt2()).items():
        save(snapshot, name, array)
        if run:
            save(snapshot, f"{name}-m", 2 * array)
            save(snapshot, f"{name}-v", 3 * array)
    save(snapshot, "System-Train-TrainStep-train", np.array([step], np.int64))
    scale = "System-Train-DynamicLossScale-train"
    save(snapshot, f"{scale}-LossScale", np.array([2.0**32], np.float32))
    save(snapshot, f"{scale}-GoodStepCounter", np.array([12], np.int64))
    (snapshot / "snapshot_done").touch()
    (folder / "model.yaml").write_text(f"model: {SECTION}")
    return snapshot


def test_the_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Every weight is there bit for bit, so that the logits are equal too."""
    snapshot_of(tmp_path / "save", run=False)
    assert detect(tmp_path / "save") == "oneflow"
    result = convert(
        tmp_path / "save", tmp_path / "hf", source_format=None, target_format="hf", dtype=None,
        verify=True,
    )  # fmt: skip
    assert result.ignored["model-wte[13:16]"] == "rows that pad the vocabulary"
    model, found = (
        tiny_gpt2(),
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval(),
    )
    with torch.no_grad():
        ids = torch.arange(POSITIONS)[None]
        assert torch.equal(found(ids).logits, model(ids).logits)


@pytest.mark.parametrize("has_meta", [True, False])
def test_a_whole_run(tmp_path: Path, has_meta: bool) -> None:
    """Moments, step and loss scale; OneFlow's first releases wrote no meta."""
    snapshot = snapshot_of(tmp_path)
    if not has_meta:
        for file in snapshot.glob("*/meta"):
            if "LossScale" not in str(file):
                file.unlink()
    with FORMATS["oneflow"].open(snapshot) as found:
        run = found.run
        for part, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
            for name, weight in found.tensors.items():
                moment = found.moments[f"{name}.{part}"].load()
                np.testing.assert_array_equal(moment, factor * weight.load(), err_msg=name)
        key = found.tensors["h.1.attn.k_proj.weight"].load()
    hf = tiny_gpt2().transformer.h[1].attn.c_attn.weight.detach().numpy()
    np.testing.assert_array_equal(key, hf[:, WIDTH : 2 * WIDTH].T)
    assert run is not None and run["config"]["optimizer"]["name"] == "adamw"
    assert run["state"]["step"] == run["engine"]["optimizer_steps"] == 30
    scale = {"mode": "dynamic", "value": 2.0**32, "finite_steps": 12, "overflows": 0}
    assert run["engine"]["loss_scale"] == scale
    assert "reads from the first sample" in found.ignored["position in the data"]


def test_the_last_snapshot_is_taken(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        snapshot_of(tmp_path, step=step)
    shutil.copytree(tmp_path / "iter20_snapshot", tmp_path / "last_snapshot")
    with FORMATS["oneflow"].open(tmp_path) as found:
        assert found.run is not None and found.run["state"]["step"] == 100


def cut(folder: Path) -> None:
    file = folder / "model-wpe" / "out"
    file.write_bytes(file.read_bytes()[:-4])


def garble(folder: Path) -> None:
    (folder / "model-wpe" / "meta").write_text("shape { dim: -1 }")


def reshape(folder: Path) -> None:
    file = folder / "model-h0-mlp-c_fc-weight" / "meta"
    text = file.read_text().replace("12", "0").replace("48", "12").replace("dim: 0", "dim: 48")
    file.write_text(text)


def set_step(folder: Path) -> None:
    (folder / "System-Train-TrainStep-train" / "out").write_bytes(b"\xff" * 8)


def huge(folder: Path) -> None:
    (folder / "model-wpe" / "meta").write_text(
        "shape { dim: 0 dim: 999999999999999999 dim: 999999999999999999 } data_type: kFloat"
    )


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a variable": (lambda folder: shutil.rmtree(folder / "model-h1-layernorm_2-beta"),
        "missing model-h1-layernorm_2-beta"),
    "a moment": (lambda folder: shutil.rmtree(folder / "model-h1-layernorm_2-beta-m"),
        "missing model-h1-layernorm_2-beta-m"),
    "bytes": (cut, "model-wpe/out: has 332 bytes, and float32 .7, 12. takes 336; copy it again"),
    "meta": (garble, "model-wpe/meta: no shape and data_type"),
    "numbers": (huge, "model-wpe/"),
    "a shape": (reshape, r"model-h0-mlp-c_fc-weight is \[48, 12\], the model's is \[12, 48\]"),
    "the step": (set_step, "System-Train-TrainStep-train/out: is neither a count"),
    "a name": (lambda folder: save(folder, "model-lm_head", np.zeros(3, np.float32)),
        "unexpected model-lm_head"),
    "heads": (lambda folder: (folder.parent / "model.yaml").unlink(), "model.yaml: no such file"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    spoil, message = BAD[what]
    spoil(snapshot_of(tmp_path / "save"))
    refused(capsys, tmp_path / "save", message)

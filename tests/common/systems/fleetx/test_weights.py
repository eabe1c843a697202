"""PaddleFleetX's folders: a file that Paddle wrote and the logits that it computed. An
incomplete model is refused.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from common.conversion.convert import convert  # noqa: E402
from common.errors import CheckpointError  # noqa: E402
from common.systems.table import detect  # noqa: E402
from common.tensor_files.containers import open_tensors  # noqa: E402
from tests.common.systems.tiny_weights import Evil, refused, require_arrays  # noqa: E402

FIXTURE = Path(__file__).parents[2] / "tensor_files" / "data" / "fleetx"
PARTS = Path(__file__).parent / "data"
YAML = Path(__file__).with_name("pretrain_gpt.yaml").read_text()


def copy(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(FIXTURE / "model.pdparams", folder)
    (folder / "pretrain_gpt.yaml").write_text(YAML)
    return folder


def arrays() -> dict[str, np.ndarray]:
    stored = open_tensors(FIXTURE / "model.pdparams")
    return {name: np.array(tensor.read()) for name, tensor in stored.items()}


def to_hugging_face(source: Path, target: Path) -> Path:
    convert(source, target, target_format="hf", verify=True)
    return target


def test_the_logits_are_paddles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the rounding of float32. Arrays stay in the mapped file from some size on; these are small."""
    monkeypatch.setattr("common.tensor_files.pickled_values._LONG", 64)
    source = copy(tmp_path / "epoch_0_step_7")
    assert detect(source) == "fleetx"
    folder = to_hugging_face(source, tmp_path / "hf")
    found = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = found(torch.arange(10).reshape(2, 5)).logits
    np.testing.assert_allclose(logits, np.load(FIXTURE / "logits.npy"), rtol=1e-5, atol=2e-6)
    config = json.loads((folder / "config.json").read_text())
    keys = ("n_inner", "embd_pdrop", "attn_pdrop", "resid_pdrop")
    assert [config[key] for key in keys] == [None, 0.1, 0.2, 0.1]
    assert (tmp_path / "hf" / "conversion.json").is_file()


@pytest.mark.parametrize("protocol", [2, 4])
def test_other_forms_hold_the_same(tmp_path: Path, protocol: int) -> None:
    """Pairs of a name and an array. Query, key and value are apart (``fuse_attn_qkv: False``); a bfloat16 is uint16."""
    expected = to_hugging_face(copy(tmp_path / "one"), tmp_path / "hf")
    state = {name: (f"tensor_{n}", array) for n, (name, array) in enumerate(arrays().items())}
    block = "gpt.decoder.layers.0.self_attn."
    for kind in ("weight", "bias"):
        _, fused = state.pop(f"{block}qkv_proj.{kind}")
        # of 24 columns head 0 has the first twelve: q, k and v of four each
        for number, part in enumerate("qkv"):
            columns = [12 * head + 4 * number + column for head in range(2) for column in range(4)]
            state[f"{block}{part}_proj.{kind}"] = fused[..., columns]
    (copy(tmp_path / "two") / "model.pdparams").write_bytes(pickle.dumps(state, protocol))
    found = to_hugging_face(tmp_path / "two", tmp_path / "again")
    weights = "model.safetensors"
    assert (found / weights).read_bytes() == (expected / weights).read_bytes()
    tensors = {"a": np.array([[0x3F80]], np.uint16), "b": np.asfortranarray(np.eye(2, 3))}
    (tmp_path / "bf.pdparams").write_bytes(pickle.dumps(tensors, protocol))
    stored = open_tensors(tmp_path / "bf.pdparams")
    assert stored["a"].dtype == "bfloat16" and stored["a"].read() == 0x3F80
    np.testing.assert_array_equal(stored["b"].read(), np.eye(2, 3))


def test_the_folders_of_ranks(tmp_path: Path) -> None:
    """Ranks of a sharding group save all parameters, of which one is taken."""
    epoch = tmp_path / "epoch_0_step_7"
    one = copy(epoch / "mp_00_sharding_00_pp_00")
    copy(epoch / "mp_00_sharding_01_pp_00")
    assert detect(epoch) == "fleetx"
    (one / "pretrain_gpt.yaml").rename(epoch / "pretrain_gpt.yaml")
    to_hugging_face(epoch, tmp_path / "hf")
    copy(epoch / "mp_01_sharding_00_pp_00")
    missing = r"epoch_0_step_7: missing mp_01_sharding_01_pp_00; copy"
    with pytest.raises(CheckpointError, match=missing):
        to_hugging_face(epoch, tmp_path / "out")
    copy(epoch / "mp_01_sharding_01_pp_00")
    # two whole models are not halves of one
    with pytest.raises(CheckpointError, match=r"qkv_proj.bias is \[48\], the model's is \[24\]"):
        to_hugging_face(epoch, tmp_path / "out")
    to_hugging_face(one, tmp_path / "out")


def drawn(layer: int, name: str, *shape: int) -> np.ndarray:
    """Return the numbers that data/README.md gave to a parameter. layer: 0 outside the blocks."""
    return np.random.default_rng(crc32(f"{layer} {name}".encode())).standard_normal(shape, np.float32)


def model_of_parts() -> dict[str, np.ndarray]:
    """Return the model of data/, whole and under our names."""
    width, heads = 8, 2
    found = {
        "wte.weight": drawn(0, "word_embeddings.weight", 12, width),
        "wpe.weight": drawn(0, "position_embeddings.weight", 5, width),
        "ln_f.weight": drawn(0, "norm.weight", width),
        "ln_f.bias": drawn(0, "norm.bias", width),
    }
    for block, layer in (("h.0.", 1), ("h.1.", 2)):
        for ours, theirs, inputs, outputs in (
            ("attn.c_proj", "out_proj", width, width),
            ("mlp.c_fc", "linear1", width, 4 * width),
            ("mlp.c_proj", "linear2", 4 * width, width),
        ):
            found[f"{block}{ours}.weight"] = drawn(layer, f"{theirs}.weight", inputs, outputs).T
            found[f"{block}{ours}.bias"] = drawn(layer, f"{theirs}.bias", outputs)
        for name in ("1.weight", "1.bias", "2.weight", "2.bias"):
            found[f"{block}ln_{name}"] = drawn(layer, f"norm{name}", width)
        weight = drawn(layer, "qkv_proj.weight", width, 3 * width).reshape(width, heads, 3, -1)
        bias = drawn(layer, "qkv_proj.bias", 3 * width).reshape(heads, 3, -1)
        for number, part in enumerate("qkv"):
            found[f"{block}attn.{part}_proj.weight"] = weight[:, :, number].reshape(width, width).T
            found[f"{block}attn.{part}_proj.bias"] = bias[:, number].reshape(width)
    return found


def copy_parts(layout: str, folder: Path) -> Path:
    shutil.copytree(PARTS / layout, folder)
    (folder / "pretrain.yaml").write_text(
        YAML.replace("vocab_size: 11", "vocab_size: 12").replace("num_layers: 1", "num_layers: 2")
    )
    return folder


@pytest.mark.parametrize("layout", ["1x2", "2x2"])
def test_parts_of_tensors_and_stages_make_the_whole(tmp_path: Path, layout: str) -> None:
    """Bit for bit, from files of Paddle's own pipeline; and through our own folder."""
    source = copy_parts(layout, tmp_path / "epoch_0_step_7")
    assert detect(source) == "fleetx"
    require_arrays(source, "fleetx", model_of_parts())
    convert(source, tmp_path / "own", target_format="torch_gpt2", verify=True)
    require_arrays(tmp_path / "own", "torch_gpt2", model_of_parts())


def test_states_of_generators_are_not_loaded(tmp_path: Path) -> None:
    """A run on GPUs saves objects of a class of Paddle's beside epoch and step."""
    source = copy_parts("1x2", tmp_path / "epoch")
    meta = pickle.dumps({"epoch": 0, "step": 7}, 2)[:-1] + b"X\x0e\0\0\0cuda_rng_state]("
    for file in source.glob("*/meta_state.pdopt"):
        file.write_bytes(meta + b"cpaddle.fluid.core_avx\nGeneratorState\n)\x81es.")
    require_arrays(source, "fleetx", model_of_parts())
    for file in source.glob("*/meta_state.pdopt"):
        file.write_bytes(pickle.dumps({"epoch": np.array(0), "step": np.array(7)}, 4))
    require_arrays(source, "fleetx", model_of_parts())


def resaved(file: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    """Return a function that saves files again, with other values."""

    def spoil(folder: Path) -> None:
        for path in folder.glob(file):
            stored = open_tensors(path)
            state = stored.tree | {name: np.array(tensor.read()) for name, tensor in stored.items()}
            path.write_bytes(pickle.dumps(change(state), 4))

    return spoil


def test_an_interleaved_pipeline_has_other_numbers(tmp_path: Path) -> None:
    """Blocks have the number of their chunk and their place in it; the first has the embedding."""

    def numbered(state: dict[str, Any]) -> dict[str, Any]:
        pattern = r"_layers\.([23])\."
        return {re.sub(pattern, lambda found: f"_layers.2.{int(found[1]) - 2}.", n): each for n, each in state.items()}

    source = copy_parts("2x2", tmp_path / "epoch")
    resaved("*_pp_01/model.pdparams", numbered)(source)
    require_arrays(source, "fleetx", model_of_parts())


FIRST, LAST = "mp_00_sharding_00_pp_00", "mp_01_sharding_00_pp_01"


def with_value(file: str, name: str, value: Any) -> Callable[[Path], None]:
    return resaved(file, lambda state: state | {name: value})


MODEL_OF_LAST = f"{LAST}/model.pdparams"
BAD_PARTS: dict[str, Callable[[Path], object]] = {
    f"missing {LAST}; copy": lambda folder: shutil.rmtree(folder / LAST),
    f"{LAST}/meta_state.pdopt: step is 8, and {FIRST} says 7": with_value(f"{LAST}/meta_state.pdopt", "step", 8),
    "1 of 2 tensor ranks lack gpt.decoder.layers.1.norm2.bias":
        resaved(MODEL_OF_LAST, lambda state: {n: each for n, each in state.items() if "2.norm2.bias" not in n}),
    "tensor ranks hold gpt.decoder.layers.1.linear1.bias as .*16.*3":
        with_value(MODEL_OF_LAST, "_layers.2.linear1.bias", np.zeros(3, np.float32)),
    f"{MODEL_OF_LAST}: _layers.1.norm1.bias is in another stage too":
        with_value(MODEL_OF_LAST, "_layers.1.norm1.bias", np.zeros(8, np.float32)),
    "unexpected lm_head.weight": with_value("*_pp_01/model.pdparams", "lm_head.weight", np.ones(2, np.float32)),
}  # fmt: skip


def test_the_true_vocabulary_of_a_model_yaml_comes_first(tmp_path: Path) -> None:
    source = copy(tmp_path / "padded")
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 5, "vocab_size": 7}
    (source / "model.yaml").write_text(f"model: {model}")
    table = "gpt.embeddings.word_embeddings.weight"
    result = convert(source, tmp_path / "hf", target_format="hf", verify=True)
    assert result["ignored"] == {f"{table}[7:11]": "rows that pad the vocabulary"}
    found = open_tensors(tmp_path / "hf" / "model.safetensors")
    np.testing.assert_array_equal(found["transformer.wte.weight"].read(), arrays()[table][:7])


def with_model(content: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.pdparams").write_bytes(pickle.dumps(content, 4))


def with_yaml(text: str, name: str = "pretrain_gpt.yaml") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


BAD_ONE: dict[str, Callable[[Path], object]] = {
    "model.pdparams: its pickle names posix.system, .* nothing of it was executed":
        with_model({"gpt.decoder.norm.weight": np.zeros(2000), "x": Evil()}),
    "model.pdparams: not a whole file": lambda folder: os.truncate(folder / "model.pdparams", 900),
    "a is not an array of numbers": with_model({"a": 1}),
    "holds no names of fleetx, but a": with_model({"a": np.zeros(3)}),
    "missing gpt.decoder.layers.1.norm1.weight": with_yaml(YAML.replace("num_layers: 1", "num_layers: 2")),
    "Model lacks num_attention_heads; give the file that the run was started with":
        with_yaml(YAML.replace("  num_attention_heads: 2\n", "")),
    "other.yaml, pretrain_gpt.yaml have a section Model; leave one there": with_yaml(YAML, "other.yaml"),
    "no YAML with a section Model": with_yaml("Optimizer: {}"),
}  # fmt: skip


@pytest.mark.parametrize("message", [*BAD_ONE, *BAD_PARTS])
def test_bad_input_is_refused(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    source = copy(tmp_path / "source") if message in BAD_ONE else copy_parts("2x2", tmp_path / "source")
    (BAD_ONE | BAD_PARTS)[message](source)
    refused(capsys, source, message, "--from", "fleetx")
    assert not (tmp_path / "executed").exists()


def test_a_byte_that_is_missing_or_too_many_is_found(tmp_path: Path) -> None:
    """A pickle has no checksum, but its frames tell their sizes."""
    path = tmp_path / "model.pdparams"
    whole = pickle.dumps({name: np.arange(99, dtype=np.float32) for name in "ab"}, protocol=4)
    for place in range(0, len(whole), 49):
        for changed in (whole[:place] + whole[place + 1 :], whole[:place] + b"\0" + whole[place:]):
            path.write_bytes(changed)
            with pytest.raises(CheckpointError):
                open_tensors(path)

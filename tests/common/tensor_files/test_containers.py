"""Our safetensors reader and writer against the safetensors library, MindSpore's checkpoint files against MindSpore
itself, and what is refused.
"""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch, save_file

from common.errors import CheckpointError
from common.tensor_files import mindspore_ckpt
from common.tensor_files.arrays import TensorKind, TensorSource
from common.tensor_files.containers import open_tensors
from common.tensor_files.mindspore_ckpt import stream_mindspore
from common.tensor_files.safetensors_file import INDEX, stream_safetensors, stream_shards, write_safetensors

TENSORS = {
    "half": torch.tensor([[1.5, -2.0, 3.25], [0.1, 1e30, -0.0]], dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "double": torch.arange(4.0, dtype=torch.float64),
}


def test_the_library_writes_what_we_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt", "note": "7"})
    stored = open_tensors(tmp_path / "x.safetensors")
    assert stored.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        found = stored[name]
        assert (f"torch.{found.dtype}", found.shape) == (str(tensor.dtype), tensor.shape)
        content = tensor.view(torch.int16) if name == "half" else tensor
        assert found.read().tobytes() == content.numpy().tobytes()


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    """Names in any script, shapes of no to three dims, and none at all."""
    tensors = {
        "跑\n": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
        " ": np.array(2.5, np.float16),
        "metadata": np.zeros((5, 0), np.int64),
        "a" * 20: np.arange(7, dtype=np.uint8)[::2],
    }
    for written in (tensors, {}):
        write_safetensors(tmp_path / "x.safetensors", written)
        read = load_file(tmp_path / "x.safetensors")
        assert read.keys() == written.keys()
        for name, array in written.items():
            assert read[name].dtype == array.dtype and read[name].shape == array.shape
            assert read[name].tobytes() == array.tobytes()


def raw(header: object, data: bytes = b"\0" * 8) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(first: int, end: int, dtype: str = "F32", shape: object = (1,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


WHOLE = raw({"a": entry(0, 4), "b": entry(4, 8)})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        *((WHOLE[:end], "") for end in (5, -1)),
        (WHOLE + b"\0", ""),
        (raw({"a": 3}), ""),
        (raw({"a": entry(0, 4), "b": entry(2, 6)}), "`b`"),
        (raw({"a": entry(0, 8, "F8_E4M3", [8])}), "a is of type 'F8_E4M3', and"),
    ],
)
def test_a_file_that_does_not_fit_together_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    message = f"x.safetensors: not a whole safetensors file: .*{reason}.*; copy it again"
    with pytest.raises(CheckpointError, match=message):
        open_tensors(path)


# ---- shards, and the one door for all formats ----


def shards_of(folder: Path, limit: int) -> dict[str, int]:
    folder.mkdir(exist_ok=True)
    arrays = {name: np.full((2, 3), number, np.uint16) for number, name in enumerate("abcd")}
    of = {name: TensorSource(dtype="bfloat16", shape=(2, 3), load=array.view) for name, array in arrays.items()}
    return stream_shards(folder, of, limit=limit)


def test_shards_are_those_of_the_library_and_read_as_one(tmp_path: Path) -> None:
    assert list(shards_of(tmp_path / "small", 48)) == ["model.safetensors"]
    assert not (tmp_path / "small" / INDEX).exists()
    names = [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert list(shards_of(tmp_path / "large", 5)) == names, "a large tensor is alone"
    assert len(shards_of(tmp_path, 30)) == 2  # 12 bytes a tensor
    files = sorted(path.name for path in tmp_path.glob("model-*"))
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 48}
    places = {}
    for file in files:
        for name, tensor in load_torch(tmp_path / file).items():
            places[name] = file
            assert tensor.dtype == torch.bfloat16 and tensor.shape == (2, 3)
    assert places == index["weight_map"] and sorted(set(places.values())) == files
    stored = open_tensors(tmp_path / INDEX)
    assert [int(stored[name].read()[0, 0]) for name in stored] == [0, 1, 2, 3]


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    shards_of(tmp_path, 24)
    index = json.loads((tmp_path / INDEX).read_text())
    places = index["weight_map"]
    for content, message in (
        ({"weight_map": places | {"e": places["a"]}}, "do not hold the same tensors: e"),
        ({"weight_map": {"a": places["a"]}}, "do not hold the same tensors: b"),
        ({"weight_map": {"a": "../model.safetensors"}}, "another folder"),
        ({"weights": {}}, "not an index of shards"),
        ({"weight_map": places | {"d": "gone.safetensors"}}, "no such file"),
    ):
        (tmp_path / INDEX).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            open_tensors(tmp_path / INDEX)


def test_a_file_is_known_by_what_it_begins_with(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "lightning.ckpt")
    kinds = {"a": TensorKind(dtype="float32", shape=(2,))}
    stream_safetensors(tmp_path / "weights", kinds, [np.ones(2, np.float32)])
    for name in ("lightning.ckpt", "weights"):
        stored = open_tensors(tmp_path / name)
        assert stored["a"].read().tolist() == [1, 1]
    for name, words, message in (
        ("notes.txt", "only words", "not a known weight file"),
        ("empty.ckpt", "", "is empty"),
    ):
        (tmp_path / name).write_text(words)
        with pytest.raises(CheckpointError, match=message):
            open_tensors(tmp_path / name)


ARRAYS = {
    "h.0.attn.c_proj.weight": ("float32", np.arange(12, dtype=np.float32).reshape(4, 3)),
    "half": ("float16", np.array([1.5, -2], np.float16)),
    "bf": ("bfloat16", np.array([[0x3FC0, 0xC000, 0x7F80]], np.uint16)),
    "step_num": ("int32", np.array(7, np.int32)),
    "epoch_num": ("int64", np.array(2**40, np.int64)),
    "done": ("bool", np.array([True, False])),
    "double": ("float64", np.array([2.5])),
    "bytes": ("uint8", np.array([7, 8], np.uint8)),
}
KINDS = {name: TensorKind(dtype=word, shape=array.shape) for name, (word, array) in ARRAYS.items()}


def write(path: Path, seal: bool) -> Path:
    """seal: the checksum at the end, as MindSpore's crc_check writes it."""
    checksum = stream_mindspore(path, KINDS, (array for _, array in ARRAYS.values()))
    with path.open("ab") as file:
        file.write(b"crc_num" + checksum.to_bytes(10, "big") if seal else b"")
    return path


@pytest.mark.parametrize("seal", [True, False])
def test_mindspore_reads_and_writes_the_same(
    tmp_path: Path, seal: bool, mindspore: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspore.train import serialization

    ms, theirs = mindspore, tmp_path / "theirs.ckpt"
    monkeypatch.setattr(mindspore_ckpt, "_SLICE", 20)  # the first tensor in three parts
    loaded = ms.load_checkpoint(str(write(tmp_path / "ours.ckpt", seal)), crc_check=seal)
    assert list(loaded) == list(ARRAYS)
    for name, (word, array) in ARRAYS.items():
        assert str(loaded[name].dtype).lower() == word and loaded[name].shape == array.shape
        assert bytes(loaded[name].get_bytes()) == array.tobytes()
    monkeypatch.setattr(serialization, "SLICE_SIZE", 1)  # KiB
    large = np.arange(600, dtype=np.float32).reshape(200, 3)
    tensors = {name: loaded[name] for name in ARRAYS} | {"large": ms.Tensor(large)}
    records = [{"name": name, "data": tensor} for name, tensor in tensors.items()]
    more = {"note": "abcé", "loss_scale": 1024.0}
    ms.save_checkpoint(records, str(theirs), crc_check=seal, append_dict=more)
    stored = open_tensors(theirs)
    for name, (word, array) in ARRAYS.items():
        assert stored[name].dtype == word and stored[name].shape == array.shape
        assert stored[name].read().tobytes() == array.tobytes()
    assert theirs.read_bytes().count(b"\x05large") == 3, "in slices"
    np.testing.assert_array_equal(stored["large"].read(), large)
    assert "note" not in stored and stored["loss_scale"].read() == 1024


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    changed = bytearray(write(tmp_path / "x.ckpt", seal=True).read_bytes())
    changed[changed.index(np.float32(5).tobytes()) + 1] ^= 1
    (tmp_path / "x.ckpt").write_bytes(changed)
    with pytest.raises(CheckpointError, match="its checksum is"):
        open_tensors(tmp_path / "x.ckpt")


def value(tag: bytes, tensor: bytes) -> bytes:
    inner = b"\x0a" + bytes([len(tag)]) + tag + tensor
    return b"\x0a" + bytes([len(inner)]) + inner


def tensor(dims: bytes, kind: bytes, content: bytes) -> bytes:
    inner = dims + b"\x12" + bytes([len(kind)]) + kind + b"\x1a" + bytes([len(content)]) + content
    return b"\x12" + bytes([len(inner)]) + inner


ONE = value(b"a", tensor(b"\x08\x01", b"Float32", b"\0" * 4))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (value(b"a", tensor(b"\x08\x02", b"Float32", b"\0" * 4)), "a has 4 bytes, .*32 .2."),
        (value(b"a", tensor(b"\x08\x01", b"Complex64", b"\0" * 8)), "of type 'Complex64'"),
        (ONE + value(b"b", tensor(b"\x08\x01", b"Float32", b"\0" * 4)) + ONE, "a is there twice"),
        (b"\x10\x01", "no tensor"),
    ],
)
def test_a_message_that_does_not_fit_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    message = f"not a whole MindSpore checkpoint.*({reason})"
    with pytest.raises(CheckpointError, match=message):
        open_tensors(tmp_path / "x.ckpt")


def test_older_scalars_and_packed_shapes_are_read(tmp_path: Path) -> None:
    content = value(b"step_num", tensor(b"\x08\x00", b"Int32", b"\7\0\0\0"))
    content += value(b"a", tensor(b"\x0a\x02\x02\x01", b"UInt8", b"\1\2"))
    (tmp_path / "x.ckpt").write_bytes(content)
    stored = open_tensors(tmp_path / "x.ckpt")
    assert stored["step_num"].read() == 7 and stored["step_num"].shape == ()
    assert stored["a"].read().tolist() == [[1], [2]]

"""MindSpore's checkpoint files against MindSpore itself, and what is refused."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from common.errors import CheckpointError
from common.tensor_files import mindspore_ckpt
from common.tensor_files.arrays import TensorKind
from common.tensor_files.containers import open_tensors
from common.tensor_files.mindspore_ckpt import stream_mindspore

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
    with open_tensors(theirs) as stored:
        for name, (word, array) in ARRAYS.items():
            assert stored[name].dtype == word and stored[name].shape == array.shape
            assert stored[name].read().tobytes() == array.tobytes()
        assert len(stored["large"].segments) == 3
        np.testing.assert_array_equal(stored["large"].read(), large)
        assert stored.plain == {"note": "abcé"} and stored["loss_scale"].read() == 1024


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    changed = bytearray(write(tmp_path / "x.ckpt", seal=True).read_bytes())
    changed[changed.index(np.float32(5).tobytes()) + 1] ^= 1
    (tmp_path / "x.ckpt").write_bytes(changed)
    with pytest.raises(CheckpointError, match="its checksum is"):
        open_tensors(tmp_path / "x.ckpt").__enter__()


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
    with pytest.raises(CheckpointError, match=message), open_tensors(tmp_path / "x.ckpt"):
        pass


def test_older_scalars_and_packed_shapes_are_read(tmp_path: Path) -> None:
    content = value(b"step_num", tensor(b"\x08\x00", b"Int32", b"\7\0\0\0"))
    content += value(b"a", tensor(b"\x0a\x02\x02\x01", b"UInt8", b"\1\2"))
    (tmp_path / "x.ckpt").write_bytes(content)
    with open_tensors(tmp_path / "x.ckpt") as stored:
        assert stored["step_num"].read() == 7 and stored["step_num"].shape == ()
        assert stored["a"].read().tolist() == [[1], [2]]

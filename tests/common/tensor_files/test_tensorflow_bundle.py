"""TensorFlow's checkpoints: a file that TensorFlow wrote, and tables made here by the letter of the
format, good and bad.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from common.errors import CheckpointError
from common.tensor_files.containers import open_tensors
from common.tensor_files.tensorflow_bundle import masked_crc32c

FIXTURE = Path(__file__).parent / "data" / "openai"
MAGIC = bytes.fromhex("57fb808b247547db")


def bit_by_bit(data: bytes) -> int:
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    value = bit_by_bit(data)
    return (((value >> 15 | value << 17) + 0xA282EAD8) % 2**32).to_bytes(4, "little")


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])


def block(entries: Mapping[bytes, bytes], kind: int = 0) -> bytes:
    """Keys without what they share with the one before."""
    content, before = b"", b""
    for key, value in entries.items():
        shared = next(
            (
                place
                for place, (one, other) in enumerate(zip(key, before, strict=False))
                if one != other
            ),
            min(len(key), len(before)),
        )
        content += (
            varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        )
        before = key
    content += bytes(4) + (1).to_bytes(4, "little") + bytes([kind])  # one restart, at the beginning
    return content + masked(content)


def table(*blocks: bytes) -> bytes:
    """A table of these blocks: they, one without entries, and one that says where they are."""
    content, places = b"", {}
    for number, part in enumerate(blocks):
        places[bytes([number])] = varint(len(content)) + varint(len(part) - 5)
        content += part
    empty, index = block({}), block(places)
    footer = (
        varint(len(content))
        + varint(len(empty) - 5)
        + varint(len(content) + len(empty))
        + varint(len(index) - 5)
    )
    return content + empty + index + footer.ljust(40, b"\0") + MAGIC


def entry(
    data: bytes = b"",
    kind: int = 1,
    dims: tuple[int, ...] = (),
    shard: int = 0,
    offset: int = 0,
    size: int | None = None,
    more: bytes = b"",
) -> bytes:
    shape = b"".join(
        b"\x12" + varint(len(varint(size)) + 1) + b"\x08" + varint(size) for size in dims
    )
    place = (
        b"\x18"
        + varint(shard)
        + b"\x20"
        + varint(offset)
        + b"\x28"
        + varint(len(data) if size is None else size)
    )
    return (
        b"\x08"
        + varint(kind)
        + b"\x12"
        + varint(len(shape))
        + shape
        + place
        + b"\x35"
        + masked(data)
        + more
    )


HEADER = {b"": b"\x08\x01"}
FOUR = np.float32(2.5).tobytes()


def write(folder: Path, index: bytes, data: bytes = FOUR) -> Path:
    (folder / "m.data-00000-of-00001").write_bytes(data)
    (folder / "m.index").write_bytes(index)
    return folder / "m.index"


def test_files_of_tensorflow_are_read() -> None:
    with open_tensors(FIXTURE / "model.ckpt.index") as stored:
        names = sorted(name for name in stored if name.startswith("model/") and "Adam" not in name)
        assert len(stored) == 23 and len(names) == 16
        for number, name in enumerate(names):
            values = stored[name].read()
            assert values.dtype == np.float32
            # as README.md there says
            np.testing.assert_array_equal(values.reshape(-1), np.arange(values.size) / 16 + number)
        assert stored["model/h0/attn/c_attn/w"].shape == (1, 8, 24)
        assert (
            stored["global_step"].read() == 0
            and stored["global_step"].dtype == "int64"
            and stored["global_step"].shape == ()
        )
        part = stored["model/h0/mlp/c_fc/w"].read([[0, 1], [2, 4], [1, 3]])
        np.testing.assert_array_equal(
            part, [[[9 + 65 / 16, 9 + 66 / 16], [9 + 97 / 16, 9 + 98 / 16]]]
        )


def test_many_blocks_types_and_texts(tmp_path: Path) -> None:
    data = FOUR + b"\x07\0\0\0\x80\x3f\0\xc0" + b"\x02\x01\x02\x03\x04hi"
    blocks = (
        block(HEADER | {b"a/half": entry(data[8:12], 14, (2,), offset=8), b"a/whole": entry(FOUR)}),
        block(
            {
                b"a/z": entry(data[4:8], 3, (1, 1), offset=4),
                b"b\xc3\xa9": entry(b"", 19, (0, 3)),
                b"text": entry(data[12:], 7, offset=12),
            }
        ),
    )
    with open_tensors(write(tmp_path, table(*blocks), data)) as stored:
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()} == {
            "a/half": ("bfloat16", (2,)), "a/whole": ("float32", ()), "a/z": ("int32", (1, 1)),
            "bé": ("float16", (0, 3)),
        }  # fmt: skip
        assert (
            stored["a/half"].read().tolist() == [0x3F80, 0xC000]
            and stored["a/whole"].read() == 2.5
            and stored["a/z"].read() == 7
        )
        assert stored.plain == {"text": b"\x02\x01\x02\x03\x04hi"}


REFUSED = {
    "does not end as an index does": table(block(HEADER | {b"a": entry(FOUR)}))[:-1] + b"\0",
    r"compressed in manner 1 \(1 is snappy\)": table(block(HEADER | {b"a": entry(FOUR)}, kind=1)),
    "holds no header": table(block({b"a": entry(FOUR)})),
    "big-endian": table(block({b"": b"\x08\x01\x10\x01", b"a": entry(FOUR)})),
    "its data are 0 files": table(block({b"": b"\x08\x00"})),
    "a ends at byte 5 of data file 0, and that has 4": table(
        block(HEADER | {b"a": entry(FOUR, offset=1)})
    ),
    "a ends at byte": table(block(HEADER | {b"a": entry(FOUR, offset=2**64)})),
    "data file 1, and there are 1": table(block(HEADER | {b"a": entry(FOUR, shard=1)})),
    r"a has 4 bytes, and its shape is float32 \[2\]": table(
        block(HEADER | {b"a": entry(FOUR, dims=(2,))})
    ),
    "the checksum of a is": table(block(HEADER | {b"a": entry(b"else", size=4)})),
    "of TensorFlow's type 8": table(block(HEADER | {b"a": entry(FOUR, 8)})),
    "a is cut into slices": table(block(HEADER | {b"a": entry(FOUR, more=b"\x3a\x00")})),
    "field 1 of an entry is not a number": table(block(HEADER | {b"a": b"\x0a\x01a"})),
    "can't decode": table(block(HEADER | {b"\xff": entry(FOUR)})),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, reason: str) -> None:
    path = write(tmp_path, REFUSED[reason])
    with (
        pytest.raises(
            CheckpointError, match=f"m.index: not a whole TensorFlow checkpoint: .*{reason}"
        ),
        open_tensors(path),
    ):
        pass


def test_every_cut_and_every_changed_byte_is_refused(tmp_path: Path) -> None:
    for file in FIXTURE.glob("model.*"):
        shutil.copy(file, tmp_path)
    index = tmp_path / "model.ckpt.index"
    content = index.read_bytes()

    def refused(file: Path, data: bytes) -> None:
        before = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(CheckpointError), open_tensors(index):
            pass
        file.write_bytes(before)

    for place in range(0, len(content) - 48, 7):
        refused(index, content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    for place in range(0, len(content), 13):
        refused(index, content[:place])
    data = tmp_path / "model.ckpt.data-00002-of-00003"
    whole = data.read_bytes()
    for place in (0, 1777, len(whole) - 1):
        refused(data, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refused(data, whole[:place])
    data.unlink()
    with (
        pytest.raises(CheckpointError, match=r"model.ckpt.data-00002-of-00003: no such file"),
        open_tensors(index),
    ):
        pass


def test_checksum(tmp_path: Path) -> None:
    """RFC 3720, B.4, and bit by bit; of arrays in memory and of mapped files."""
    vectors = {
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        b"123456789": 0xE3069283,
    }
    for content, expected in vectors.items():
        assert bit_by_bit(content) == expected
        assert masked_crc32c(np.frombuffer(content, np.uint8)).to_bytes(4, "little") == masked(
            content
        )
    data = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    (tmp_path / "data").write_bytes(data.tobytes())
    mapped = np.memmap(tmp_path / "data", np.uint8, "r")
    for size in (0, 1, 11370, 11371, 31000, 90961, 100_000):
        for array in (data, mapped):
            assert masked_crc32c(array[:size]).to_bytes(4, "little") == masked(
                data[:size].tobytes()
            ), size

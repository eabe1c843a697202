"""Read TensorFlow's checkpoints without TensorFlow. NAME.index is a sorted table that locates each
tensor in NAME.data-00000-of-00001.

Format: tensorflow/core/util/tensor_bundle/tensor_bundle.cc and
tensorflow/core/protobuf/tensor_bundle.proto; the table is LevelDB's,
tensorflow/core/lib/io/format.cc and block.cc.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from common.tensor_files.arrays import NUMPY_TYPES, Bytes, FileTensor, TensorFile, map_file
from common.tensor_files.protobuf import read_fields, read_varint

_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER = 48
_TRAILER = 5
"""Bytes after each block: its compression and its checksum."""
_MAX_SHARDS = 10_000
_TYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 9: "int64",
    10: "bool", 14: "bfloat16", 19: "float16",
}  # fmt: skip
"""Types by the numbers of tensorflow/core/framework/types.proto."""
_TEXT = 7


def read_tensorflow(path: Path, content: Bytes) -> TensorFile:
    """Return tensors by name, and texts as raw bytes; every checksum is compared. path: NAME.index.

    Raises ValueError if a file is broken or compressed, or a tensor is cut into slices, and
    CheckpointError if a file is missing.
    """
    entries = dict(_table(content))
    if b"" not in entries:
        raise ValueError("it holds no header")
    header = _Message(entries.pop(b""))
    count = header.number(1)
    if header.number(2):
        raise ValueError(
            "its numbers are big-endian; save it again on a machine with little-endian numbers"
        )
    if not 1 <= count <= _MAX_SHARDS:
        raise ValueError(f"it says that its data are {count} files")
    shards = [
        map_file(path.with_suffix(f".data-{number:05d}-of-{count:05d}")) for number in range(count)
    ]
    tensors: dict[str, FileTensor] = {}
    texts: dict[str, bytes] = {}
    for key, value in entries.items():
        if key.startswith(b"\0"):  # a slice of a variable; the variable's own entry is refused
            continue
        name, entry = key.decode(), _Message(value)
        kind, data = entry.number(1), _data(name, entry, shards)
        if kind == _TEXT:
            texts[name] = data.tobytes()
        else:
            tensors[name] = _tensor(name, kind, entry, data)
    return TensorFile(path=path, tensors=tensors, plain=texts, tree=tensors | texts)


class _Message:
    """Return the fields of a protobuf message by number. Raises ValueError if a field is of another
    kind than expected.
    """

    def __init__(self, content: Bytes) -> None:
        self._fields: dict[int, list[int | Bytes]] = {}
        for number, value in read_fields(content):
            self._fields.setdefault(number, []).append(value)

    def number(self, field: int) -> int:
        value = self._fields.get(field, [0])[-1]
        if not isinstance(value, int):
            raise ValueError(f"field {field} of an entry is not a number")
        return value

    def parts(self, field: int) -> list[Bytes]:
        return [value for value in self._fields.get(field, []) if not isinstance(value, int)]


def _data(name: str, entry: _Message, shards: list[Bytes]) -> Bytes:
    if entry.parts(7):
        raise ValueError(
            f"{name} is cut into slices, as a variable with a partitioner is; save it again without"
            " one"
        )
    number, first, size = (entry.number(field) for field in (3, 4, 5))
    if number >= len(shards):
        raise ValueError(f"{name} lies in data file {number}, and there are {len(shards)}")
    data = shards[number][first : first + size]
    if data.size < size:
        raise ValueError(
            f"{name} ends at byte {first + size} of data file {number}, and that has"
            f" {shards[number].size}"
        )
    return data


def _tensor(name: str, kind: int, entry: _Message, data: Bytes) -> FileTensor:
    if kind not in _TYPES:
        raise ValueError(
            f"{name} is of TensorFlow's type {kind}, and {', '.join(_TYPES.values())} are known"
        )
    dtype = _TYPES[kind]
    dims = [_Message(dim).number(1) for shape in entry.parts(2) for dim in _Message(shape).parts(2)]
    if math.prod(dims) * NUMPY_TYPES[dtype].itemsize != data.size:
        raise ValueError(f"{name} has {data.size} bytes, and its shape is {dtype} {dims}")
    expected = b"".join(part.tobytes() for part in entry.parts(6))
    found = masked_crc32c(data)
    if int.from_bytes(expected, "little") != found:
        raise ValueError(
            f"the checksum of {name} is {found:08x}, and the index says"
            f" {int.from_bytes(expected, 'little'):08x}"
        )
    return FileTensor(name=name, dtype=dtype, shape=tuple(dims), segments=(data,))


def masked_crc32c(data: Bytes) -> int:
    """Return the CRC-32C of ``data``, rotated and shifted as in
    tensorflow/core/lib/hash/crc32c.h.
    """
    import google_crc32c  # only this format needs it

    # it takes any contiguous buffer without a copy
    value: int = google_crc32c.value(data)  # type: ignore[arg-type]
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table(content: Bytes) -> Iterator[tuple[bytes, Bytes]]:
    """Yield keys and values, in order."""
    footer = content[-_FOOTER:]
    if footer.size < _FOOTER or footer[-8:].tobytes() != _MAGIC:
        raise ValueError("it does not end as an index does")
    further, after = _handle(footer, 0)
    if list(_block(content, *further)):
        raise ValueError("it has filters, which TensorFlow does not write")
    index, _ = _handle(footer, after)
    for _, handle in _block(content, *index):
        place, _ = _handle(handle, 0)
        yield from _block(content, *place)


def _handle(content: Bytes, position: int) -> tuple[tuple[int, int], int]:
    """Return first byte and size of a block, and the position after these two numbers."""
    first, position = read_varint(content, position)
    size, position = read_varint(content, position)
    return (first, size), position


def _block(content: Bytes, first: int, size: int) -> Iterator[tuple[bytes, Bytes]]:
    whole = content[first : first + size + _TRAILER]
    if size < 4 or whole.size < size + _TRAILER:
        raise ValueError(
            f"a block of {size} bytes begins at byte {first}, and the index has {content.size}"
        )
    if whole[size]:
        raise ValueError(
            f"a block is compressed in manner {whole[size]} (1 is snappy), which TensorFlow does"
            " not do; save it again with it"
        )
    if masked_crc32c(whole[: size + 1]) != int.from_bytes(whole[size + 1 :].tobytes(), "little"):
        raise ValueError(f"the checksum of the block at byte {first} is wrong")
    restarts = int.from_bytes(whole[size - 4 : size].tobytes(), "little")
    end = size - 4 * (restarts + 1)
    key, position = b"", 0
    while position < end:
        shared, position = read_varint(whole, position)
        more, position = read_varint(whole, position)
        length, position = read_varint(whole, position)
        if shared > len(key) or position + more + length > end:
            raise ValueError(f"an entry of the block at byte {first} does not fit")
        key = key[:shared] + whole[position : position + more].tobytes()
        position += more
        yield key, whole[position : position + length]
        position += length

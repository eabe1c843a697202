"""Read and write MindSpore's ``.ckpt`` files without MindSpore or protobuf: read by memory map, written as a stream.

Format: mindspore/ccsrc/utils/checkpoint.proto. ``_exec_save`` of mindspore/train/serialization.py defines what the
schema leaves open: a large tensor is several values of one tag, and ``crc_num`` with a CRC-32 in ten bytes may follow
the last value.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.tensor_files.arrays import NUMPY_TYPES, Bytes, FileTensor, TensorFile, TensorKind, bytes_of, joined
from common.tensor_files.checksummed import ChecksummedFile
from common.tensor_files.protobuf import bytes_field, bytes_key, read_message, read_numbers, to_varint

_TYPES = {
    "float64": "Float64", "float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16",
    "int64": "Int64", "int32": "Int32", "int16": "Int16", "int8": "Int8", "uint8": "UInt8",
    "bool": "Bool",
}  # fmt: skip
_WORDS = {theirs: word for word, theirs in _TYPES.items()}
_SLICE = 2**29
"""Bytes of one value, as MindSpore cuts them: a protobuf message must stay below 2 GiB."""
_SEAL = b"crc_num"
_SEAL_SIZE = len(_SEAL) + 10
"""Marker at the end of a file of ``save_checkpoint(crc_check=True)``."""


def read_mindspore(path: Path, content: Bytes) -> TensorFile:
    """Return tensors by tag. Numbers (``step_num``) are tensors of shape (), and texts are left out.

    Raises ValueError if the file is broken or encrypted, if its checksum is wrong, or if it holds types that GPT-2 does
    not have.
    """
    seal = content[-_SEAL_SIZE:].tobytes()
    if seal.startswith(_SEAL) and len(seal) == _SEAL_SIZE:
        content = content[:-_SEAL_SIZE]
        found, expected = zlib.crc32(content.data), int.from_bytes(seal[len(_SEAL) :], "big")
        if found != expected:
            raise ValueError(f"its checksum is {found}, and the file says {expected}")
    tensors: dict[str, FileTensor] = {}
    values = map(_value, read_message(content).get(1, ()))
    for tag, group in groupby(values, lambda value: value.tag):
        slices = [*group]
        if tag in tensors:
            raise ValueError(f"{tag} is there twice")
        if slices[-1].type != "str":
            tensors[tag] = _tensor(slices)
    if not tensors:
        raise ValueError("it holds no tensor")
    return TensorFile(path, tensors)


def is_checkpoint(head: bytes) -> bool:
    """Whether a file begins like a checkpoint; a strategy file or a pickle does not."""
    return head[:1] == bytes_key(1, 0)[:1]


class _Value(NamedTuple):
    """One message Value; only the last slice of a tensor completes it."""

    tag: str
    dims: tuple[int, ...]
    type: str
    data: Bytes


def _tensor(slices: list[_Value]) -> FileTensor:
    last = slices[-1]
    if last.type not in _WORDS:
        raise ValueError(f"{last.tag} is of type {last.type!r}, and {', '.join(_WORDS)} are known")
    dtype = _WORDS[last.type]
    size = sum(part.data.size for part in slices)
    shape = () if last.dims == (0,) and size else last.dims  # older releases write a scalar as [0]
    if any(part.dims != last.dims or part.type != last.type for part in slices):
        raise ValueError(f"the slices of {last.tag} differ in shape or type")
    if min(shape, default=0) < 0 or math.prod(shape) * NUMPY_TYPES[dtype].itemsize != size:
        raise ValueError(f"{last.tag} has {size} bytes, and its shape is {dtype} {list(shape)}")
    load = partial(joined, dtype, *(part.data for part in slices))
    return FileTensor(dtype=dtype, shape=shape, load=load)


def _value(message: Bytes) -> _Value:
    fields = read_message(message)
    if 1 not in fields:
        raise ValueError("a value has no tag")
    name = fields[1][-1].tobytes().decode()
    if 2 not in fields:
        raise ValueError(f"{name} is a map parameter, not a tensor; GPT-2 has none")
    tensor = read_message(fields[2][-1])
    if 2 not in tensor or 3 not in tensor:
        raise ValueError(f"{name} has no type or no content")
    dims = tuple(size for part in tensor.get(1, ()) for size in read_numbers(part))
    return _Value(name, dims, tensor[2][-1].tobytes().decode(), tensor[3][-1])


def stream_mindspore(path: Path, kinds: Mapping[str, TensorKind], arrays: Iterable[NDArray[Any]]) -> int:
    """Write and fsync a file of ``arrays``, made one at a time in the order of ``kinds``. bfloat16
    comes as uint16 words.

    Returns the CRC-32 of the file's bytes. OSError is left to the caller, who owns the folder.
    """
    with ChecksummedFile(path) as file:
        pending = iter(kinds.items())
        for array in arrays:  # zip would keep the last array alive while the next is made
            name, kind = next(pending)
            assert array.nbytes == kind.nbytes, f"the array of {name} is that of its kind"
            dims = b"".join(b"\x08" + to_varint(size) for size in kind.shape)
            head = dims + bytes_field(2, _TYPES[kind.dtype].encode())
            tag, parts = bytes_field(1, name.encode()), [array]
            if array.nbytes > _SLICE:
                data = np.frombuffer(bytes_of(array), np.uint8)
                parts = [data[first : first + _SLICE] for first in range(0, data.size, _SLICE)]
                del data
            for part in parts:
                tensor = head + bytes_key(3, part.nbytes)
                value = tag + bytes_key(2, len(tensor) + part.nbytes) + tensor
                file.write(bytes_key(1, len(value) + part.nbytes) + value)
                file.write_array(part)
            del array, part, parts
        assert next(pending, None) is None, "every kind has its array"
    return file.checksum

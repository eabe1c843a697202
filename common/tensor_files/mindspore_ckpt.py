"""Read and write MindSpore's ``.ckpt`` files without MindSpore or protobuf: read by memory map, written as a stream.

Format: mindspore/ccsrc/utils/checkpoint.proto. ``_exec_save`` of mindspore/train/serialization.py defines what the
schema leaves open: a large tensor is several values of one tag, and ``crc_num`` with a CRC-32 in ten bytes may follow
the last value.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

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
    for tag, slices in groupby(values, itemgetter(0)):
        _, shapes, types, parts = zip(*slices, strict=True)
        if tag in tensors:
            raise ValueError(f"{tag} is there twice")
        if types[-1] != "str":
            tensors[tag] = _tensor(tag, shapes, types, parts)
    if not tensors:
        raise ValueError("it holds no tensor")
    return TensorFile(path, tensors)


def is_checkpoint(head: bytes) -> bool:
    """Whether a file begins like a checkpoint; a strategy file or a pickle does not."""
    return head[:1] == bytes_key(1, 0)[:1]


def _tensor(tag: str, shapes: Sequence[tuple[int, ...]], types: Sequence[str], parts: Sequence[Bytes]) -> FileTensor:
    """Return the tensor of its slices."""
    dims, kind = shapes[-1], types[-1]
    if kind not in _WORDS:
        raise ValueError(f"{tag} is of type {kind!r}, and {', '.join(_WORDS)} are known")
    if {*shapes} != {dims} or {*types} != {kind}:
        raise ValueError(f"the slices of {tag} differ in shape or type")
    dtype, size = _WORDS[kind], sum(part.size for part in parts)
    shape = () if dims == (0,) and size else dims  # older releases write a scalar as [0]
    if min(shape, default=0) < 0 or math.prod(shape) * NUMPY_TYPES[dtype].itemsize != size:
        raise ValueError(f"{tag} has {size} bytes, and its shape is {dtype} {list(shape)}")
    return FileTensor(dtype=dtype, shape=shape, load=partial(joined, dtype, *parts))


def _value(message: Bytes) -> tuple[str, tuple[int, ...], str, Bytes]:
    """Return tag, shape, type and content of one message Value, which is a slice of a tensor."""
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
    return name, dims, tensor[2][-1].tobytes().decode(), tensor[3][-1]


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

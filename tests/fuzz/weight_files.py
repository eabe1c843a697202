"""Readers of weight files that use no code of the project: torch, pickle, and protobuf by hand."""

from __future__ import annotations

import argparse
import itertools
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

Arrays = dict[str, np.ndarray]


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, torch.Tensor):
        bits = tree.view(torch.uint16) if tree.dtype is torch.bfloat16 else tree.detach()
        yield prefix, bits.numpy()
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}/{key}")


def read_torch(path: Path) -> Arrays:
    with torch.serialization.safe_globals([argparse.Namespace]):  # which Megatron's files hold
        return dict(_flat(torch.load(path, map_location="cpu", weights_only=True)))


def damaged_record(path: Path) -> str | None:
    """Return a record of tensors or of the pickle whose CRC-32 does not fit, which torch.load does
    not compare.
    """
    content = path.read_bytes()
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except Exception:  # it is not an archive that Python reads
        return None
    for record in records:
        at = record.header_offset
        is_read = "/data/" in record.filename or record.filename.endswith("/data.pkl")
        if not is_read or at + 30 > len(content):
            continue
        first = at + 30 + sum(struct.unpack("<HH", content[at + 26 : at + 30]))
        if record.CRC and zlib.crc32(content[first : first + record.file_size]) != record.CRC:
            return record.filename
    return None


def _protobuf(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7:  # of which value was the length
            assert key & 7 == 2 and at + value <= len(data)
            at, value = at + value, data[at : at + value]
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def _varints(data: bytes | int) -> Iterator[int]:
    at = 0
    while isinstance(data, bytes) and at < len(data):
        value, at = _varint(data, at)
        yield value
    if isinstance(data, int):
        yield data


def read_mindspore(path: Path) -> Arrays:
    """Checkpoint: repeated value = 1 {tag = 1, tensor = 2 {dims = 1, type = 2, content = 3}}."""
    types = {b"Float32": "<f4", b"Float16": "<f2", b"Int32": "<i4", b"Int64": "<i8"}
    found: Arrays = {}
    for _, message in _protobuf(path.read_bytes()):
        record = dict(_protobuf(message))
        if 2 not in record:
            continue
        fields = list(_protobuf(record[2]))
        dims = [n for number, value in fields if number == 1 for n in _varints(value) if n]
        name, words = record[1].decode(), dict(fields)
        array = np.frombuffer(words.get(3, b""), types[words[2]])
        array = np.concatenate([found[name].reshape(-1), array]) if name in found else array
        found[name] = array.reshape(dims if array.size == np.prod(dims) else -1)
    return found


class _Numpy(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        place = (module.removeprefix("numpy.").replace("_core", "core"), name)
        known = (("core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"))
        if place not in known:
            raise pickle.UnpicklingError(name)
        return super().find_class(module, name)


def read_paddle(path: Path) -> Arrays:
    with path.open("rb") as file:
        tree = _Numpy(file).load()
    tree.pop("StructuredToParameterName@@", None)
    return {name: v[1] if isinstance(v, tuple) else v for name, v in tree.items()}


def count_paddle(path: Path) -> None:
    """Give the fixture's arrays counting numbers in place of random ones."""
    tree = pickle.loads(path.read_bytes())
    first = itertools.count(1)
    for name, value in tree.items():
        array = value[1] if isinstance(value, tuple) else value
        if isinstance(array, np.ndarray):
            counted = np.array([next(first) for _ in range(array.size)], array.dtype)
            counted = counted.reshape(array.shape)
            tree[name] = (value[0], counted) if isinstance(value, tuple) else counted
    path.write_bytes(pickle.dumps(tree, protocol=4))

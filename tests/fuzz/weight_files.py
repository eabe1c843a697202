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

from tests.fuzz.engine import ROOT

FIXTURES = ROOT / "tests" / "common" / "tensor_files" / "data"


FLEETX = """\
Model: {vocab_size: 11, hidden_size: 8, num_layers: 1, num_attention_heads: 2, \
ffn_hidden_size: , hidden_dropout_prob: 0.1,
  attention_probs_dropout_prob: 0.2, max_position_embeddings: 5, initializer_range: 0.02}
"""


Arrays = dict[str, np.ndarray]


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, torch.Tensor):
        yield (
            prefix,
            tree.view(torch.uint16).numpy()
            if tree.dtype is torch.bfloat16
            else tree.detach().numpy(),
        )
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


def read_protobuf(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value: Any
            value, at = _varint(data, at)
        else:
            assert key & 7 == 2
            size, at = _varint(data, at)
            assert at + size <= len(data)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def read_mindspore(path: Path) -> Arrays:
    """Checkpoint: repeated value = 1 {tag = 1, tensor = 2 {dims = 1, type = 2, content = 3}}."""
    found: Arrays = {}
    for _, message in read_protobuf(path.read_bytes()):
        record = dict(read_protobuf(message))
        if 2 not in record:
            continue
        dims: list[int] = []
        content, kind = b"", b""
        for number, value in read_protobuf(record[2]):
            if number == 1:
                dims += [value] if isinstance(value, int) else [item for item in _varints(value)]
            elif number == 2:
                kind = value
            else:
                content = value
        name = record[1].decode()
        array = np.frombuffer(
            content,
            {"Float32": "<f4", "Float16": "<f2", "Int32": "<i4", "Int64": "<i8"}[kind.decode()],
        )
        found[name] = np.concatenate([found[name], array]) if name in found else array
        found[name] = found[name].reshape(
            [size for size in dims if size] if found[name].size == np.prod(dims) else -1
        )
    return found


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


class _Numpy(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module.removeprefix("numpy.").replace("_core", "core"), name) in (
            ("core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(name)


def read_paddle(path: Path) -> Arrays:
    with path.open("rb") as file:
        tree = _Numpy(file).load()
    return {
        name: value[1] if isinstance(value, tuple) else value
        for name, value in tree.items()
        if name != "StructuredToParameterName@@"
    }


def count_paddle(path: Path) -> None:
    """Give the fixture's arrays counting numbers in place of random ones."""
    with path.open("rb") as file:
        tree = pickle.load(file)
    first = itertools.count(1)
    for name, value in tree.items():
        array = value[1] if isinstance(value, tuple) else value
        if isinstance(array, np.ndarray):
            counted = np.array([next(first) for _ in range(array.size)], array.dtype).reshape(
                array.shape
            )
            tree[name] = (value[0], counted) if isinstance(value, tuple) else counted
    with path.open("wb") as file:
        pickle.dump(tree, file, protocol=4)

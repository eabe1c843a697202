"""Write files that ``torch.load(weights_only=True)`` opens, without torch, one tensor at a time.

Format: see ``torch_reader``. The zip follows
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, with sizes after the data, as torch
writes them.
"""

from __future__ import annotations

import argparse
import math
import pickle
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.tensor_files.arrays import TensorKind
from common.tensor_files.checksummed import ChecksummedFile
from common.tensor_files.torch_pickle import STORAGES, TorchName, row_major

_ALIGNMENT = 64
Parts: TypeAlias = Sequence[NDArray[Any]]
"""Arrays whose bytes in row-major order, one after the other, are a tensor."""
_PLAIN = (str, bytes, int, float, bool, type(None), np.ndarray, np.generic)


@dataclass(frozen=True, kw_only=True)
class TensorLeaf(TensorKind):
    """Place of a tensor; places of one ``name`` share its storage, as tied weights do."""

    name: str


def stream_torch(path: Path, tree: Any, arrays: Iterable[NDArray[Any] | Parts]) -> None:
    """Write and fsync ``tree``: dicts, lists, tuples, ``argparse.Namespace``, plain values,
    ``TorchName`` and ``TensorLeaf``.

    arrays: one, or its parts, for each leaf, in the order in which the names first occur, made one
    at a time; bfloat16 as uint16 words. Raises TypeError for another value in the tree, before the
    file exists. OSError is left to the caller, who owns the folder. With weights_only, torch
    accepts Namespace and numpy values only after ``add_safe_globals``, as with its own files.
    """
    pickler = _Pickler()
    program = b"\x80\x02" + pickler.emit(tree) + b"."
    with ChecksummedFile(path) as file:
        archive = _Zip(file, path.stem)
        archive.add("data.pkl", _bytes(program))
        archive.add("byteorder", _bytes(b"little"))
        pending = iter(enumerate(pickler.leaves.values()))
        for array in arrays:  # zip would keep the last array alive while the next is made
            key, leaf = next(pending)
            parts = (array,) if isinstance(array, np.ndarray) else array
            size = sum(part.nbytes for part in parts)
            assert size == leaf.nbytes, f"the array of {leaf.name} is that of its leaf"
            archive.add(f"data/{key}", parts)
            del array, parts
        assert next(pending, None) is None, "every leaf has its array"
        archive.add("version", _bytes(b"3\n"))
        archive.finish()


def _bytes(data: bytes) -> Parts:
    return (np.frombuffer(data, np.uint8),)


class _Pickler:
    """Write protocol 2 by hand: pickle itself would import the names. ``leaves``: the tensors by
    name, in order.
    """

    def __init__(self) -> None:
        self.leaves: dict[str, TensorLeaf] = {}

    def emit(self, value: Any) -> bytes:
        if isinstance(value, TensorLeaf):
            return self._tensor(value)
        if isinstance(value, TorchName):
            return _global(*value.rsplit(".", 1))
        if isinstance(value, dict):
            pairs = b"".join(self.emit(key) + self.emit(part) for key, part in value.items())
            return b"}(" + pairs + b"u"
        if type(value) is list:
            return b"](" + b"".join(map(self.emit, value)) + b"e"
        if type(value) is tuple:
            return b"(" + b"".join(map(self.emit, value)) + b"t"
        if type(value) is argparse.Namespace:
            return _global("argparse", "Namespace") + b")\x81" + self.emit(vars(value)) + b"b"
        if not isinstance(value, _PLAIN):
            raise TypeError(
                f"a {type(value).__name__} has no place in a file of weights: {value!r}"
            )
        # without PROTO and STOP; only this pickle uses what it memoizes
        return pickle.dumps(value, protocol=2)[2:-1]

    def _tensor(self, leaf: TensorLeaf) -> bytes:
        assert self.leaves.setdefault(leaf.name, leaf) == leaf, (
            f"{leaf.name} has one shape and type wherever it is"
        )
        key = str(list(self.leaves).index(leaf.name))
        numel = math.prod(leaf.shape)
        storage = b"(" + self.emit("storage") + _global("torch", STORAGES[leaf.dtype])
        storage += self.emit(key) + self.emit("cpu") + self.emit(numel) + b"tQ"
        view = (
            self.emit(0)
            + self.emit(leaf.shape)
            + self.emit(row_major(leaf.shape))
            + self.emit(False)
        )
        return (
            _global("torch._utils", "_rebuild_tensor_v2")
            + b"("
            + storage
            + view
            + _global("collections", "OrderedDict")
            + b")RtR"
        )


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


class _Zip:
    """Write an archive of stored records, each aligned in the file. Sizes have 8 bytes everywhere,
    so that large files are not a special case.
    """

    def __init__(self, file: ChecksummedFile, folder: str) -> None:
        self._file, self._folder, self._directory, self._records = file, folder, b"", 0

    def add(self, name: str, parts: Parts) -> None:
        path, start = f"{self._folder}/{name}".encode(), self._file.position
        size = sum(part.nbytes for part in parts)
        extra = struct.pack("<HHQQ", 1, 16, 0, 0)
        gap = -(start + 30 + len(path) + len(extra) + 4) % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", gap) + b"Z" * gap
        # zip64, sizes that follow, UTF-8, stored, 1980-01-01
        common = struct.pack("<HHHHH", 45, 0x0808, 0, 0, 0x21)
        self._file.write(
            struct.pack(
                "<4s10sIIIHH", b"PK\3\4", common, 0, 2**32 - 1, 2**32 - 1, len(path), len(extra)
            )
            + path
            + extra
        )
        self._file.checksum = 0
        for part in parts:
            self._file.write_array(part)
        checksum = self._file.checksum
        self._file.write(struct.pack("<4sIQQ", b"PK\7\x08", checksum, size, size))
        sizes = struct.pack("<HHQQQ", 1, 24, size, size, start)
        self._directory += struct.pack(
            "<4sH10sIIIHHHHHII",
            b"PK\1\2",
            45,
            common,
            checksum,
            2**32 - 1,
            2**32 - 1,
            len(path),
            len(sizes),
            0,
            0,
            0,
            0,
            2**32 - 1,
        )
        self._directory += path + sizes
        self._records += 1

    def finish(self) -> None:
        start, size, count = self._file.position, len(self._directory), self._records
        self._file.write(self._directory)
        end = self._file.position
        self._file.write(
            struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        )
        self._file.write(struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
        self._file.write(
            struct.pack(
                "<4sHHHHIIH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0
            )
        )

"""Read files of ``torch.save`` without torch: by memory map, with pickles read only as data
(``torch_pickle``).

Format: torch/serialization.py and caffe2/serialize/inline_container.h. The file is a zip without
compression: NAME/data.pkl, NAME/version, NAME/byteorder and a record NAME/data/KEY for each
storage. Before torch 1.6 it was pickles followed by the storages.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from common.errors import CheckpointError
from common.tensor_files.arrays import NUMPY_TYPES, Bytes, TensorFile
from common.tensor_files.torch_pickle import PlainTree, Storage, load_records

ZIP_MAGIC = b"PK\x03\x04"
OLD_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""Pickled number 0x1950a86a20f9469cfc6c; older files begin with it."""


def read_torch(path: Path, content: Bytes) -> TensorFile:
    """Return tensors and values by their path in the saved object, joined by dots.

    Views (transposed, cut, shared) are read as such. The CRC-32 of a storage in a zip is compared
    when the first of its tensors is read, which then raises CheckpointError. Raises CheckpointError
    if the file names code, and almost any error if it is broken.
    """
    tree = PlainTree(
        _read_zip(path, content) if content[:4].tobytes() == ZIP_MAGIC else _read_old(path, content)
    )
    return TensorFile(path=path, tensors=tree.tensors, plain=tree.values, tree=tree.tree)


def _read_zip(path: Path, content: Bytes) -> Any:
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ValueError("the archive holds no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    # torch.serialization.set_crc32_options(False) leaves all of them 0
    has_sums = any(info.CRC for info in records.values())

    def record(info: zipfile.ZipInfo) -> tuple[Bytes, Callable[[], None] | None]:
        data = _record(content, info)
        return data, _checksum_test(path, info.filename, data, info.CRC) if has_sums else None

    def checked_bytes(info: zipfile.ZipInfo) -> bytes:
        data, check = record(info)
        if check is not None:
            check()
        return data.tobytes()

    order = records.get(f"{folder}byteorder")
    if order is not None and checked_bytes(order) != b"little":
        raise ValueError(
            "its numbers are big-endian; save it again on a machine with little-endian numbers"
        )
    storages: dict[tuple[str, str], Storage] = {}

    def storage_of(dtype: str, key: str, numel: int, view: Any) -> Storage:
        if (key, dtype) not in storages:
            info = records.get(f"{folder}data/{key}")
            if info is None or view is not None:
                raise ValueError(f"the archive holds no storage {key}")
            data, check = record(info)
            storage = Storage(dtype=dtype, numel=numel, data=data, check=check)
            if info.file_size < storage.nbytes:
                raise ValueError(
                    f"storage {key} has {info.file_size} bytes instead of {storage.nbytes}"
                )
            storages[key, dtype] = storage
        return storages[key, dtype]

    return load_records(io.BytesIO(checked_bytes(records[pickles[0]])), storage_of, str(path))


def _checksum_test(path: Path, name: str, data: Bytes, expected: int) -> Callable[[], None]:
    """Return a function that compares the CRC-32 of a record of the archive until it matched once.
    It raises CheckpointError.
    """

    @cache
    def check() -> None:
        found = crc32(data.data)
        if found != expected:
            raise CheckpointError(
                f"{path}: {name} has changed since it was written: its CRC-32 is {found:08x}, and"
                f" the archive says {expected:08x}; copy the file again or use another one"
            )

    return check


def _record(content: Bytes, info: zipfile.ZipInfo) -> Bytes:
    """Return the bytes of a record where they lie in the file."""
    head = content[info.header_offset : info.header_offset + 30].tobytes()
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"{info.filename} is compressed or encrypted, which torch.save never does")
    if len(head) < 30 or head[:4] != ZIP_MAGIC:
        raise ValueError(f"{info.filename} is not where the archive's directory says")
    first = info.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
    record = content[first : first + info.file_size]
    if record.size < info.file_size:
        raise ValueError(
            f"{info.filename} breaks off after {record.size} of {info.file_size} bytes"
        )
    return record


def _read_old(path: Path, content: Bytes) -> Any:
    if content[: len(OLD_MAGIC)].tobytes() != OLD_MAGIC:
        raise ValueError("it begins neither like a zip nor like a file of torch before 1.6")
    storages: dict[str, Storage] = {}
    views: list[tuple[Storage, str, int]] = []

    def storage_of(dtype: str, key: str, numel: int, view: Any) -> Storage:
        root = storages.setdefault(key, Storage(dtype=dtype, numel=numel))
        if view is None:
            return root
        _, offset, size = view
        part = Storage(dtype=dtype, numel=size)
        views.append((part, key, offset))
        return part

    with path.open("rb") as file:
        _magic, _version, system, tree, keys = (
            load_records(file, storage_of, str(path)) for _ in range(5)
        )
        position = file.tell()
    if not system["little_endian"]:
        raise ValueError(
            "its numbers are big-endian; save it again on a machine with little-endian numbers"
        )
    for key in keys:
        storage = storages[str(key)]
        numel = int.from_bytes(content[position : position + 8].tobytes(), "little")
        first = position + 8
        position = first + storage.nbytes
        if numel != storage.numel or position > content.size:
            raise ValueError(
                f"storage {key} should have {storage.numel} elements, and says {numel}; the file"
                f" ends at {content.size}"
            )
        storage.data = content[first:position]
    for part, key, offset in views:
        data = storages[key].data
        first = offset * NUMPY_TYPES[part.dtype].itemsize
        if data is None or not 0 <= first <= first + part.nbytes <= data.size:
            raise ValueError(f"a part of storage {key} lies beyond it")
        part.data = data[first : first + part.nbytes]
    if any(storage.data is None for storage in storages.values()):
        raise ValueError("a storage is missing")
    return tree

"""Files of ``torch.save`` without torch: read by memory map, with pickles taken as data alone (``torch_pickle``).

Format: torch/serialization.py and caffe2/serialize/inline_container.h. A zip, nothing compressed, of NAME/data.pkl, NAME/version,
NAME/byteorder and a record NAME/data/KEY for each storage; before torch 1.6, pickles and then the storages one after another.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.tensor_files.arrays import NUMPY_TYPES, Bytes, TensorFile
from common.tensor_files.torch_pickle import PlainTree, Storage, load_records

ZIP_MAGIC = b"PK\x03\x04"
OLD_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""The pickled number 0x1950a86a20f9469cfc6c with which older files begin."""


def read_torch(path: Path, content: Bytes) -> TensorFile:
    """Tensors and values by their path in what was saved, joined by dots.

    Views (transposed, cut, shared) are read as they were. The CRC-32 of a storage in a zip is compared when the first of its tensors is
    read, which then raises CheckpointError. Raises CheckpointError if the file names code, and almost any error if it is broken.
    """
    tree = PlainTree(_read_zip(path, content) if content[:4].tobytes() == ZIP_MAGIC else _read_old(path, content))
    return TensorFile(path=path, tensors=tree.tensors, plain=tree.values, tree=tree.tree)


def _read_zip(path: Path, content: Bytes) -> Any:
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise ValueError("the archive holds no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    has_sums = any(info.CRC for info in records.values())  # torch.serialization.set_crc32_options(False) leaves all of them 0

    def checked(info: zipfile.ZipInfo) -> _Checked:
        return _Checked(path=path, name=info.filename, data=_record(content, info), expected=info.CRC if has_sums else None)

    order = records.get(f"{folder}byteorder")
    if order is not None and checked(order).bytes() != b"little":
        raise ValueError("its numbers are big-endian; save it again on a machine with little-endian numbers")
    storages: dict[tuple[str, str], Storage] = {}

    def storage_of(dtype: str, key: str, numel: int, view: Any) -> Storage:
        if (key, dtype) not in storages:
            info = records.get(f"{folder}data/{key}")
            if info is None or view is not None:
                raise ValueError(f"the archive holds no storage {key}")
            record = checked(info)
            storage = Storage(dtype=dtype, numel=numel, data=record.data, check=record)
            if info.file_size < storage.nbytes:
                raise ValueError(f"storage {key} has {info.file_size} bytes instead of {storage.nbytes}")
            storages[key, dtype] = storage
        return storages[key, dtype]

    return load_records(io.BytesIO(checked(records[pickles[0]]).bytes()), storage_of, str(path))


@dataclass(kw_only=True, eq=False)
class _Checked:
    """A record of the archive. Calling it compares its CRC-32, the first time. Raises CheckpointError."""

    path: Path
    name: str
    data: Bytes
    expected: int | None
    """None: equal, or not told."""

    def __call__(self) -> None:
        if self.expected is None:
            return
        found = zlib.crc32(self.data.data)
        if found != self.expected:
            raise CheckpointError(
                f"{self.path}: {self.name} has changed since it was written: its CRC-32 is {found:08x}, and the archive says"
                f" {self.expected:08x}; copy the file again or use another one"
            )
        self.expected = None

    def bytes(self) -> bytes:
        self()
        return self.data.tobytes()


def _record(content: Bytes, info: zipfile.ZipInfo) -> Bytes:
    """The bytes of a record where they lie in the file."""
    head = content[info.header_offset : info.header_offset + 30].tobytes()
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"{info.filename} is compressed or encrypted, which torch.save never does")
    if len(head) < 30 or head[:4] != ZIP_MAGIC:
        raise ValueError(f"{info.filename} is not where the archive's directory says")
    first = info.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
    record = content[first : first + info.file_size]
    if record.size < info.file_size:
        raise ValueError(f"{info.filename} breaks off after {record.size} of {info.file_size} bytes")
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
        _magic, _version, system, tree, keys = (load_records(file, storage_of, str(path)) for _ in range(5))
        position = file.tell()
    if not system["little_endian"]:
        raise ValueError("its numbers are big-endian; save it again on a machine with little-endian numbers")
    for key in keys:
        storage = storages[str(key)]
        numel = int.from_bytes(content[position : position + 8].tobytes(), "little")
        first = position + 8
        position = first + storage.nbytes
        if numel != storage.numel or position > content.size:
            raise ValueError(f"storage {key} should have {storage.numel} elements, and says {numel}; the file ends at {content.size}")
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

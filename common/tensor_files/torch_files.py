"""Files of torch.save, read and written by torch itself: the only file of common/ that imports it.

A pickle may name any function. torch reads with weights_only, which calls none but those of
tensors, and the inert stand-ins that are named here.
"""

from __future__ import annotations

import argparse
import pickle
import re
import signal
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.interrupts import end_at_once, handling
from common.paths import require_package
from common.tensor_files.arrays import NUMPY_TYPES, Bytes, FileTensor, TensorFile, TensorSource, prefetch_arrays
from common.tensor_files.checksummed import ChecksummedFile
from common.tensor_files.pickled_values import KNOWN, foreign_class, plain_tree

ZIP_MAGIC = b"PK\x03\x04"
OLD_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""Pickled number 0x1950a86a20f9469cfc6c; files before torch 1.6 begin with it."""
_STAND_INS: dict[str, Callable[..., Any]] = KNOWN | {
    "argparse.Namespace": argparse.Namespace,
    # converters to Megatron's form write it
    "types.SimpleNamespace": argparse.Namespace,
    "signal.Signals": lambda number: number,
}
_MAX_CLASSES = 64
_AFTER_RECORD, _DIRECTORY = b"PK\x07\x08", b"PK\x01\x02"
"""Marks in a zip: after a record, where its CRC-32 is, and before its entry in the directory."""


class TorchName(str):
    """Name of torch that stands for itself, such as ``torch.float16``."""

    __slots__ = ()


def _torch(path: Path) -> Any:
    with handling({signal.SIGINT: end_at_once}):
        return require_package("torch", extra="torch", purpose=f"which reads and writes {path}")


def read_torch(path: Path, content: Bytes) -> TensorFile:
    """Return tensors and values by their path in the saved object, joined by dots.

    The CRC-32 of a tensor in a zip is compared when it is first read, which then raises CheckpointError; those of the
    other records are compared here. Raises CheckpointError if the file names code, ConfigError without torch, and
    almost any error if the file is broken.
    """
    torch = _torch(path)
    stand_ins, is_zip = dict(_STAND_INS), content[:4].tobytes() == ZIP_MAGIC
    for _ in range(_MAX_CLASSES):
        try:
            with _allowing_only(torch.serialization, stand_ins), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saved = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
            break
        except pickle.UnpicklingError as error:
            # torch says "GLOBAL NAME was not an allowed global" or "GLOBAL NAME whose module NAME"
            found = re.search(r"GLOBAL ([\w.]+) w", str(error))
            if found is None:
                said = str(error).partition("WeightsUnpickler error:")[2].strip()
                raise ValueError(said.partition("\n")[0] or "its pickle is broken") from None
            stand_ins[found[1]] = foreign_class(path, found[1])
    else:
        raise ValueError(f"it holds objects of more than {_MAX_CLASSES} classes")
    sums = _checksums_of_tensors(path, content) if is_zip else {}
    tree, tensors = plain_tree(saved, partial(_leaf_of, torch, path, sums, set()))
    return TensorFile(path, tensors, tree)


@contextmanager
def _allowing_only(torch_serialization: Any, stand_ins: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Let pickles name these, beside torch's own, and not what other packages have allowed."""
    others = torch_serialization.get_safe_globals()
    torch_serialization.clear_safe_globals()
    try:
        torch_serialization.add_safe_globals([(made, name) for name, made in stand_ins.items()])
        yield
    finally:
        torch_serialization.clear_safe_globals()
        torch_serialization.add_safe_globals(others)


def _leaf_of(torch: Any, path: Path, sums: dict[int, set[int]], read: set[int], name: str, value: Any) -> Any:
    """Return a tensor as its bytes in the mapped file, and a name of torch as text.

    sums: CRC-32 by bytes of the storage. read: addresses of the storages whose CRC-32 has been compared.
    """
    if isinstance(value, torch.dtype | torch.device):
        return TorchName(value)
    if not isinstance(value, torch.Tensor):
        return value
    word = str(value.dtype).removeprefix("torch.")
    if word not in NUMPY_TYPES or value.layout != torch.strided:
        raise ValueError(f"{name} is a tensor of {value.dtype}, {value.layout}")
    value = value.detach()
    array: NDArray[Any] = (value.view(torch.uint16) if word == "bfloat16" else value).numpy()
    array.flags.writeable = False

    def load() -> NDArray[Any]:
        storage = value.untyped_storage()
        if (place := storage.data_ptr()) not in read and (known := sums.get(storage.nbytes())):
            if crc32(torch.empty(0, dtype=torch.uint8).set_(storage).numpy()) not in known:
                raise CheckpointError(
                    f"{path}: {name} has changed since it was written (CRC-32); copy the file again or use another one"
                )
            read.add(place)
        return array

    return FileTensor(dtype=word, shape=array.shape, load=load)


def _checksums_of_tensors(path: Path, content: Bytes) -> dict[int, set[int]]:
    """Compare the CRC-32 of a zip's other records, since torch compares none. Raises CheckpointError.

    Returns the CRC-32 of the tensors by their bytes. After ``torch.serialization.set_crc32_options(False)`` all are 0,
    and none is returned.
    """
    found: dict[int, set[int]] = {}
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if not record.CRC:
                continue
            if "/data/" in record.filename:
                found.setdefault(record.file_size, set()).add(record.CRC)
                continue
            lengths = content[record.header_offset + 26 : record.header_offset + 30]
            first = record.header_offset + 30 + int(lengths.view("<u2").sum())
            data = content[first : first + record.file_size]
            if crc32(data.data) != record.CRC:
                raise CheckpointError(
                    f"{path}: {record.filename} has changed since it was written (CRC-32); copy"
                    " the file again or use another one"
                )
    return found


def write_torch(path: Path, tree: Any) -> None:
    """Write and fsync ``tree``: dicts, lists, tuples, ``argparse.Namespace``, plain values, ``TorchName`` and
    ``TensorSource``. One of these in several places is one tensor, as tied weights are.

    Tensors are loaded one at a time, and none is kept. OSError is left to the caller, who owns the folder. With
    weights_only, torch accepts Namespace and numpy values only after ``add_safe_globals``, as with its own files.
    """
    torch, tensors = _torch(path), dict[TensorSource, Any]()

    def placed(value: Any) -> Any:
        if isinstance(value, TensorSource):
            if value not in tensors:  # memory that is never touched, and so never taken
                tensor = torch.empty(value.shape, dtype=getattr(torch, value.dtype))
                tensors[value] = tensor
                # torch takes a tensor that begins as _AFTER_RECORD for the mark, and adds what
                # follows to the serialization_id. Only memory that was in use begins so.
                if (first := tensor.view(-1)[:4].view(torch.uint8)).any():
                    first.zero_()
            return tensors[value]
        if isinstance(value, TorchName):
            return getattr(torch, value.removeprefix("torch."))
        if isinstance(value, argparse.Namespace):
            return argparse.Namespace(**placed(vars(value)))
        if isinstance(value, dict):
            return {key: placed(part) for key, part in value.items()}
        return type(value)(map(placed, value)) if type(value) in (list, tuple) else value

    filling = torch.utils.deterministic
    fills, filling.fill_uninitialized_memory = filling.fill_uninitialized_memory, False
    try:
        whole = placed(tree)
    finally:
        filling.fill_uninitialized_memory = fills
    computes = torch.serialization.get_crc32_options()
    with ChecksummedFile(path) as file:
        # torch saves them in the order in which they occur, and no memory of an empty one
        made = prefetch_arrays(each.load for each in tensors if each.nbytes)
        records = _Records(file, {tensor.data_ptr() for tensor in tensors.values()}, made)
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(whole, records)
        except RuntimeError as error:  # of a file that the disk has cut short
            raise error.__context__ or error from None
        finally:
            torch.serialization.set_crc32_options(computes)
        assert next(made, None) is None, "torch has saved them all"
    tensors.clear()  # ``placed`` is a cycle, and would keep the files that these are read from open


class _Records:
    """File for torch.save that gets arrays in place of the memory of the tensors, and each record's
    CRC-32, which torch would take ten times as long to compute.
    """

    def __init__(self, file: ChecksummedFile, places: set[int], arrays: Iterator[Any]) -> None:
        """places: addresses of the tensors. arrays: in the order in which torch saves those."""
        self._file, self._places, self._arrays, self._sums = file, places, arrays, list[bytes]()

    def flush(self) -> None:
        """Do nothing: the end of the file's block writes the last bytes."""

    def write(self, data: memoryview) -> None:
        """Write a record, or what the zip has around it."""
        if np.frombuffer(data, np.uint8).ctypes.data in self._places:
            self._file.checksum, first = 0, self._file.position
            made = next(self._arrays)
            for part in (made,) if isinstance(made, np.ndarray) else made:
                self._file.write_array(part)
            assert self._file.position == first + len(data), "an array is that of its tensor"
            return
        piece, entry, sums = bytearray(data), 0, iter(self._sums)
        if piece[:4] == _AFTER_RECORD:
            piece[4:8] = self._file.checksum.to_bytes(4, "little")
            self._sums.append(bytes(piece[4:8]))
        while piece[entry : entry + 4] == _DIRECTORY:
            if any(piece[entry + 24 : entry + 28]):  # an empty record has no sum
                piece[entry + 16 : entry + 20] = next(sums)
            entry += 46 + int(np.frombuffer(piece, "<u2", 3, entry + 28).sum())
        self._file.checksum = 0
        self._file.write(piece)

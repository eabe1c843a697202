"""Safetensors files: written as a stream, one tensor at a time, and read by memory map.

Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, a JSON header, raw little-endian data).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from common.errors import CheckpointError
from common.weights.arrays import TensorKind, bytes_of

Tensors = Mapping[str, NDArray[Any]]

SAFETENSORS_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write_safetensors(path: Path, tensors: Tensors) -> int:
    """Write and fsync ``path``; returns the CRC-32 of its bytes. Peak memory is one tensor's copy at most.

    OSError is left to the caller, who owns the folder.
    """
    kinds = {name: TensorKind(dtype=array.dtype.name, shape=array.shape) for name, array in tensors.items()}
    return stream_safetensors(path, kinds, tensors.values())


def stream_safetensors(path: Path, kinds: Mapping[str, TensorKind], arrays: Iterable[NDArray[Any]]) -> int:
    """The same of ``arrays`` made one at a time, in the order of ``kinds``: none is held while the next is made."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, kind in kinds.items():
        header[name] = {"dtype": SAFETENSORS_TYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": [offset, offset + kind.nbytes]}
        offset += kind.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ChecksummedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(bytes_of(array))
            del array
        assert file.position == 8 + len(text) + offset, "the arrays are those of kinds"
    return file.checksum


_AT_ONCE = 2**18
_BEFORE_SYNC = 2**27


class ChecksummedFile:
    """A file to write from front to end, and the CRC-32 of its bytes; fsynced when the block ends. OSError is left to the caller.

    Two threads go along: for the checksum, which takes half as long as a fast disk, and to hand what is written to the disk meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._summing, self._syncing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._synced: Future[None] | None = None
        self._unsynced = 0
        self.checksum = 0
        self.position = 0

    def write(self, data: bytes | memoryview) -> None:
        summed = self._summing.submit(zlib.crc32, data, self.checksum)
        for first in range(0, len(data), _AT_ONCE):  # a large write from a mapped file may take Linux ten times as long
            self._file.write(data[first : first + _AT_ONCE])
        self.checksum = summed.result()
        self.position += len(data)
        self._unsynced += len(data)
        if self._unsynced > _BEFORE_SYNC and (self._synced is None or self._synced.done()):
            if self._synced is not None:
                self._synced.result()
            self._synced = self._syncing.submit(os.fdatasync, self._file.fileno())
            self._unsynced = 0

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._summing.shutdown()
        self._syncing.shutdown()
        with self._file:
            if error is None:
                if self._synced is not None:
                    self._synced.result()
                self._file.flush()
                os.fsync(self._file.fileno())


def file_checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            checksum = zlib.crc32(block, checksum)
    return checksum


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """A ``safetensors.safe_open`` reader of numpy arrays. Raises CheckpointError on a file that is missing or broken."""
    from safetensors import SafetensorError, safe_open

    try:
        path.open("rb").close()  # the library says of every file that it cannot open that it is not there
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: no such file; a checkpoint folder holds model.safetensors and manifest.json") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; allow this user to read it, or use another checkpoint") from None
    try:
        with safe_open(path, framework="numpy") as reader:
            yield reader
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); use another checkpoint") from None


def check_tensors(
    path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], partial: Mapping[str, int] | None = None
) -> None:
    """Raise CheckpointError listing every tensor that is missing, unexpected, of another shape, or ``partial``: how many elements are
    there of those that are not whole."""
    partial = partial or {}
    faults = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    faults += [f"unexpected {name} {list(shape)}" for name, shape in found.items() if name not in expected]
    faults += [f"of {name} {list(expected[name])} only {there} elements are there" for name, there in partial.items()]
    faults += [
        f"{name} is {list(found[name])}, the model's is {list(shape)}"
        for name, shape in expected.items()
        if name in found and name not in partial and found[name] != shape
    ]
    if faults:
        shown = "; ".join(faults[:6]) + (f"; and {len(faults) - 6} more" if len(faults) > 6 else "")
        remedy = (
            "Use another checkpoint: a rank's part is lost" if partial else "Give the model section that the checkpoint was trained with"
        )
        raise CheckpointError(f"{path}: does not fit the model: {shown}. {remedy}")


def shapes_of(reader: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118  (safe_open is no mapping)

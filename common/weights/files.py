"""Safetensors files: written as a stream, one tensor at a time, and read by memory map.

Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, a JSON header, raw little-endian data).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError

Tensors = Mapping[str, NDArray[Any]]

_DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}


def write_safetensors(path: Path, tensors: Tensors) -> int:
    """Write and fsync ``path``; returns the CRC-32 of its bytes. Peak memory is one tensor's copy at most.

    OSError is left to the caller, who owns the folder.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = 0
    with path.open("wb") as file:
        for head in (len(text).to_bytes(8, "little"), text):
            file.write(head)
            checksum = zlib.crc32(head, checksum)
        with ThreadPoolExecutor(1) as other:  # the checksum takes half as long as a fast disk
            for array in tensors.values():
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                summed = other.submit(zlib.crc32, data, checksum)
                file.write(data)
                checksum = summed.result()
        file.flush()
        os.fsync(file.fileno())
    return checksum


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

    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a checkpoint folder holds model.safetensors and manifest.json")
    try:
        with safe_open(path, framework="numpy") as reader:
            yield reader
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); use another checkpoint") from None


def check_tensors(path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError listing every tensor that is missing, unexpected or of another shape."""
    faults = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    faults += [f"unexpected {name} {list(shape)}" for name, shape in found.items() if name not in expected]
    faults += [
        f"{name} is {list(found[name])}, the model's is {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        shown = "; ".join(faults[:6]) + (f"; and {len(faults) - 6} more" if len(faults) > 6 else "")
        raise CheckpointError(f"{path}: does not fit the model: {shown}. Give the model section that the checkpoint was trained with")


def shapes_of(reader: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118  (safe_open is no mapping)

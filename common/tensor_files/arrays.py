"""Read tensors of weight files as they lie on disk, by memory map, when they are asked for.

numpy has no bfloat16. Such tensors are passed on as 16-bit words (uint16), bit for bit, until a
caller asks for float32.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import CheckpointError
from common.files import open_input, reading

Bytes: TypeAlias = NDArray[np.uint8]
Made = TypeVar("Made")

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    word: np.dtype(f"<{code}")
    for word, code in {
        "float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": "u2",
        "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1", "uint8": "u1", "bool": "?",
    }.items()
}  # fmt: skip
"""Array type that holds a tensor of each type."""

_BLOCK = 2**22
"""Elements converted at a time, so that a large tensor needs no second copy."""
_COMPARED = 2**18
"""Bytes compared at a time."""
_TILE = (128, 512)
"""Rows and columns of a matrix that are transposed at a time."""
_TILE_GAP = 16
"""Elements between rows of a tile: rows a power of two apart share few lines of a cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorKind:
    dtype: str
    """Key of NUMPY_TYPES."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY_TYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSource(TensorKind):
    load: Callable[[], Any]
    """Returns an array of the elements in row-major order, with bfloat16 as uint16 words. For a file of torch it may
    return several, which are written one after the other.
    """


class FileTensor(TensorSource):
    """Tensor of a file. What loads it raises CheckpointError if the bytes have changed."""

    def read(self) -> NDArray[Any]:
        """Return the tensor. The array is read-only, and a view of the file where that is possible.

        bfloat16 comes as uint16 words (``widen_bfloat16``). A view may be unaligned: copy it before passing it to a
        framework. Raises CheckpointError if the bytes have changed.
        """
        array: NDArray[Any] = self.load().reshape(self.shape)
        return array


def joined(dtype: str, *segments: Bytes) -> NDArray[Any]:
    """Return the elements in segments of a file, one after the other; a view of a single one."""
    parts = [segment for segment in segments if segment.size]
    whole = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
    whole.flags.writeable = False
    return whole.view(NUMPY_TYPES[dtype])


class TensorFile(dict[str, FileTensor]):
    """Tensors of one file (or of the shards of one index) by name.

    tree: tensors and other values, nested as in a file of torch or Paddle; a name is the path, joined by dots.
    """

    def __init__(self, path: Path, tensors: Mapping[str, FileTensor], tree: Any = None) -> None:
        super().__init__(tensors)
        self.path, self.tree = path, tree


def map_file(path: Path) -> Bytes:
    """Map the bytes of a file read-only; they stay readable as long as an array of them lives.
    Raises CheckpointError.
    """
    with open_input(path, CheckpointError) as file, reading(path, CheckpointError):
        if not path.stat().st_size:
            raise CheckpointError(f"{path}: the file is empty; copy it again or use another one")
        return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)


def contiguous(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array, or a row-major copy if it is not row-major."""
    if array.flags.c_contiguous:
        return array
    ordered = np.empty(array.shape, array.dtype)
    copy_array(ordered, array)
    return ordered


def copy_array(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy an array into another one of its shape, and transposed matrices in tiles.

    numpy by itself copies along the columns of the result, which do not fit in a cache. A tile is
    first copied along its rows, and transposed within the cache: two to three times as fast.
    """
    if source.ndim > 2:
        for one, other in zip(target, source, strict=True):
            copy_array(one, other)
        return
    if source.ndim < 2 or source.strides[0] >= source.strides[1]:
        target[...] = source
        return
    rows, columns = _TILE
    room, turned = np.empty((rows, columns + _TILE_GAP), source.dtype), source.T
    for column in range(0, turned.shape[1], columns):
        for row in range(0, turned.shape[0], rows):
            part = turned[row : row + rows, column : column + columns]
            tile = room[: part.shape[0], : part.shape[1]]
            tile[...] = part
            target[column : column + columns, row : row + rows] = tile.T


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array in row-major order; copies only if the array is not row-major."""
    return contiguous(array).reshape(-1).view(np.uint8).data


def same_bytes(one: FileTensor, other: FileTensor) -> bool:
    """Whether two tensors have one type and shape and are equal bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (np.frombuffer(bytes_of(tensor.read()), np.uint8) for tensor in (one, other))
    spans = (slice(start, start + _COMPARED) for start in range(0, first.size, _COMPARED))
    return all(np.array_equal(first[span], second[span]) for span in spans)


def prefetch_arrays(makers: Iterable[Callable[[], Made]]) -> Iterator[Made]:
    """Yield the arrays of the makers. The next one is made while the caller uses this one.

    Ending early waits for nothing: the garbage collector may do so in a thread that Python starts,
    whose lock a wait for another thread would need.
    """
    pool, arrays = ThreadPoolExecutor(1), (make() for make in makers)
    coming = [pool.submit(next, arrays, None)]
    try:
        while (array := coming.pop().result()) is not None:
            coming.append(pool.submit(next, arrays, None))
            yield array
            del array  # before the one after the next is begun: two are in memory
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def widen_bfloat16(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the same values as float32: a bfloat16 is the upper half of a float32."""
    return np.left_shift(words, 16, dtype=np.uint32).view(np.float32)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the words of the nearest bfloat16, ties to even. Values beyond the largest become
    infinity; NaN stays NaN with its sign.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    words = np.empty(flat.size, np.uint16)
    for first in range(0, flat.size, _BLOCK):
        block = flat[first : first + _BLOCK]
        bits = block.view(np.uint32)
        upper = bits >> 16
        # a NaN with all its payload in the lower half would become infinity: set its quiet bit instead
        words[first : first + _BLOCK] = np.where(np.isnan(block), upper | 0x40, (bits + (0x7FFF + (upper & 1))) >> 16)
    return words.reshape(np.shape(values))

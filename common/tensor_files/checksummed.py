"""Write a file from front to end with the CRC-32 of its bytes, and compute the CRC-32 of a file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from common.tensor_files.arrays import Bytes, copy_array

_BUFFER = 2**21
_BUFFERS = 3
"""Buffers of a file: one is filled while two are written."""
_REFUSALS = errno.EINVAL, errno.EOPNOTSUPP
"""Errors by which a file system refuses a direct write."""
_AT_ONCE = 2**18


class ChecksummedFile:
    """Open a file to write from front to end, with the CRC-32 of its bytes. It is fsynced when the block ends. OSError
    is left to the caller.

    Bytes are gathered in buffers. Two threads write full ones past the page cache (O_DIRECT), so that neither a copy in
    the kernel nor a sync at the end is waited for. A file system that refuses this gets usual writes.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        # O_DIRECT takes whole pages
        pages = mmap.mmap(-1, _BUFFERS * _BUFFER, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffers = np.frombuffer(pages, np.uint8).reshape(_BUFFERS, _BUFFER)
        self._written: list[Future[None] | None] = [None] * _BUFFERS
        self._current, self._filled = 0, 0
        self._writing = ThreadPoolExecutor(_BUFFERS - 1)
        self._is_direct: bool | None = None
        self.checksum = 0
        self.position = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.write_array(np.frombuffer(data, np.uint8))

    def write_array(self, array: NDArray[Any]) -> None:
        """Write the bytes of an array in row-major order. Rows of one that is not row-major, such
        as a transposed view of a mapped file, are put in order on their way into a buffer.
        """
        if array.flags.c_contiguous:
            array = array.reshape(-1).view(np.uint8)
        row, first = array[:1].nbytes, 0
        while first < len(array) and row:
            buffer, start = self._buffers[self._current], self._filled
            if (written := self._written[self._current]) is not None:
                written.result()
                self._written[self._current] = None
            rows = array[first : first + (_BUFFER - start) // row]
            if not len(rows):  # this row reaches into the next buffer
                self.write_array(np.ascontiguousarray(array[first]))
                first += 1
                continue
            copy_array(np.ndarray(rows.shape, rows.dtype, buffer[start:].data), rows)
            first += len(rows)
            self._filled += rows.nbytes
            self.position += rows.nbytes
            self.checksum = crc32(buffer[start : self._filled].data, self.checksum)
            if self._filled == _BUFFER:
                if self._is_direct is None:
                    self._is_direct = _set_direct(self._file.fileno(), True)
                self._written[self._current] = self._writing.submit(self._write_out, buffer, self.position - _BUFFER)
                self._current, self._filled = (self._current + 1) % _BUFFERS, 0

    def _write_out(self, buffer: Bytes, offset: int) -> None:
        descriptor, done = self._file.fileno(), 0
        while done < buffer.size:
            was_direct = self._is_direct
            # through the cache, a write of several MiB may take three times as long
            part = buffer[done:] if was_direct else buffer[done : done + _AT_ONCE]
            try:
                done += os.pwrite(descriptor, part.data, offset + done)
            except OSError as error:
                if not was_direct or error.errno not in _REFUSALS:
                    raise
                self._is_direct = False
                _set_direct(descriptor, False)

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._file, self._writing:
            if error is not None:
                return
            for waited in filter(None, self._written):
                waited.result()
            if self._is_direct:  # the last bytes do not fill a block of the disk
                self._is_direct = False
                _set_direct(self._file.fileno(), False)
            last = self._buffers[self._current, : self._filled]
            self._write_out(last, self.position - last.size)
            os.fsync(self._file.fileno())


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Write past the page cache from now on, or through it. Return whether this was possible."""
    direct: int = getattr(os, "O_DIRECT", 0)  # not on every system
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~direct
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (direct if wanted else 0))
    except OSError:
        return False
    return bool(direct)


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            checksum = crc32(block, checksum)
    return checksum

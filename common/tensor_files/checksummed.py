"""Write a file from front to end with the CRC-32 of its bytes, and compute the CRC-32 of a file."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from isal.isal_zlib import crc32

_AT_ONCE = 2**18
_BEFORE_SYNC = 2**27


class ChecksummedFile:
    """Open a file to write from front to end, with the CRC-32 of its bytes. It is fsynced when the
    block ends. OSError is left to the caller.

    Two threads help: one computes the checksum. The other tells the disk to begin with what is
    already written.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._summing, self._syncing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._synced: Future[None] | None = None
        self._unsynced = 0
        self.checksum = 0
        self.position = 0

    def write(self, data: bytes | memoryview) -> None:
        summed = self._summing.submit(crc32, data, self.checksum)
        # Linux may take ten times as long for a large write from a mapped file
        for first in range(0, len(data), _AT_ONCE):
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._summing.shutdown()
        self._syncing.shutdown()
        with self._file:
            if error is None:
                if self._synced is not None:
                    self._synced.result()
                self._file.flush()
                os.fsync(self._file.fileno())


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            checksum = crc32(block, checksum)
    return checksum

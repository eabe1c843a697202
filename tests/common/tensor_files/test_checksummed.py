"""Sums of files beside zlib's, and how their bytes reach the disk."""

import errno
import fcntl
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.tensor_files.checksummed import ChecksummedFile, file_checksum

BUFFER = 2**21
SOURCE = np.random.default_rng(0).integers(0, 256, 6 * BUFFER + 5, np.uint8)


@pytest.mark.parametrize("size", [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, SOURCE.size])
def test_files_about_as_large_as_the_buffers(tmp_path: Path, size: int) -> None:
    with ChecksummedFile(tmp_path / "file") as file:
        file.write_array(SOURCE[:size])
    content = SOURCE[:size].tobytes()
    assert (tmp_path / "file").read_bytes() == content
    assert file.position == size
    assert file.checksum == file_checksum(tmp_path / "file") == zlib.crc32(content)


@pytest.mark.parametrize("before", [0, 1, 4, BUFFER - 6])
def test_arrays_of_any_order_are_written_row_major(tmp_path: Path, before: int) -> None:
    """Rows reach over the ends of buffers, which lie at no multiple of their elements."""
    numbers = SOURCE[: 6 * BUFFER].view(np.float32)
    matrix = numbers[: 1000 * 1537].reshape(1000, 1537)
    arrays = [
        matrix.T, matrix[:, 3:900].T, matrix[::2, ::-1].T, matrix[:, 5:], numbers[::3],
        matrix[:, :768].reshape(1000, 2, 384).transpose(1, 2, 0), matrix[:, :0].T, matrix[0, 0],
        SOURCE[: BUFFER + 8].reshape(2, -1).T, np.broadcast_to(numbers[:5], (3, 5)),
        np.lib.stride_tricks.as_strided(numbers, (3, 1_200_000), (4, 8)),
    ]  # fmt: skip
    content = bytes(before) + b"".join(array.tobytes() for array in arrays)
    with ChecksummedFile(tmp_path / "file") as file:
        file.write(bytes(before))
        for array in arrays:
            file.write_array(array)
    assert (tmp_path / "file").read_bytes() == content
    assert (file.position, file.checksum) == (len(content), zlib.crc32(content))


class Writes:
    """Writes of a process in place of ``os.pwrite``: their sizes, and whether they passed the page
    cache.
    """

    def __init__(self, *, refused: int = 0) -> None:
        """refused: the number of direct writes that fail, as on a file system without them."""
        self.made: list[tuple[int, bool]] = []
        self.refused = refused
        self._pwrite = os.pwrite

    def __call__(self, descriptor: int, data: Any, offset: int) -> int:
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and self.refused:
            self.refused -= 1
            raise OSError(errno.EINVAL, "Invalid argument")
        written = self._pwrite(descriptor, data, offset)
        self.made.append((written, is_direct))
        return written


def takes_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_each_byte_is_written_once_and_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_direct_writes(tmp_path):
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT")
    monkeypatch.setattr(os, "pwrite", writes := Writes())
    with ChecksummedFile(tmp_path / "file") as file:
        file.write_array(SOURCE)
    assert sorted(writes.made) == [(5, False), *[(BUFFER, True)] * 6]


@pytest.mark.parametrize("where", ["flag", "write"])
def test_a_file_system_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Some refuse the flag, others the first write."""
    usual, flags = fcntl.fcntl, []

    def without(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL:
            flags.append(bool(value & os.O_DIRECT))
            if value & os.O_DIRECT and where == "flag":
                raise OSError(errno.EINVAL, "Invalid argument")
        return usual(descriptor, command, value)

    monkeypatch.setattr(fcntl, "fcntl", without)
    monkeypatch.setattr(os, "pwrite", writes := Writes(refused=2))
    with ChecksummedFile(tmp_path / "file") as file:
        file.write_array(SOURCE)
    assert (tmp_path / "file").read_bytes() == SOURCE.tobytes()
    assert file.checksum == zlib.crc32(SOURCE)
    assert flags[0] is True
    assert sum(size for size, _ in writes.made) == SOURCE.size
    assert not any(is_direct for _, is_direct in writes.made)


def test_a_full_disk_is_an_error_and_ends_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"), ChecksummedFile(tmp_path / "file") as file:
        for _ in range(3):
            file.write_array(SOURCE)
    with pytest.raises(OSError, match="No space left"), ChecksummedFile(tmp_path / "file") as file:
        file.write(b"little")


def test_an_error_of_the_caller_ends_the_threads_and_closes_the_file(tmp_path: Path) -> None:
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(SystemExit), ChecksummedFile(tmp_path / "file") as file:
        file.write_array(SOURCE)
        raise SystemExit(143)  # as after SIGTERM
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (before, files)

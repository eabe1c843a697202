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


@pytest.mark.parametrize("size", [0, BUFFER - 1, BUFFER, BUFFER + 1, SOURCE.size])
def test_files_about_as_large_as_the_buffers(tmp_path: Path, size: int) -> None:
    with ChecksummedFile(tmp_path / "file") as file:
        file.write_array(SOURCE[:size])
    content = SOURCE[:size].tobytes()
    assert (tmp_path / "file").read_bytes() == content
    assert file.position == size
    assert file.checksum == file_checksum(tmp_path / "file") == zlib.crc32(content)


@pytest.mark.parametrize("before", [0, 1, BUFFER - 6])
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


@pytest.mark.parametrize("refused", ["nothing", "the flag", "the first write"])
def test_full_buffers_pass_the_page_cache_unless_the_file_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Each byte is written once."""
    control, write, sizes = fcntl.fcntl, os.pwrite, {True: list[int](), False: list[int]()}
    try:
        os.close(os.open(tmp_path / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        refused = "the flag"

    def without_flag(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT and refused == "the flag":
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, value)

    def recorded(descriptor: int, data: Any, offset: int) -> int:
        is_direct = bool(control(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and refused == "the first write":
            raise OSError(errno.EINVAL, "Invalid argument")
        written = write(descriptor, data, offset)
        sizes[is_direct].append(written)
        return written

    monkeypatch.setattr(fcntl, "fcntl", without_flag)
    monkeypatch.setattr(os, "pwrite", recorded)
    with ChecksummedFile(tmp_path / "file") as file:
        file.write_array(SOURCE)
    assert (tmp_path / "file").read_bytes() == SOURCE.tobytes()
    assert file.checksum == zlib.crc32(SOURCE)
    assert sizes[True] == ([BUFFER] * 6 if refused == "nothing" else [])
    assert sum(sizes[True] + sizes[False]) == SOURCE.size


def test_a_full_disk_is_an_error_and_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

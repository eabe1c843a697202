"""Sums of files beside zlib's, how their bytes reach the disk, bfloat16 words against torch, and
rectangles of arrays against numpy's slices.
"""

import errno
import fcntl
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.tensor_files.arrays import bytes_of, prefetch_arrays, round_to_bfloat16, widen_bfloat16
from common.tensor_files.checksummed import ChecksummedFile, file_checksum

BUFFER = 2**21
SOURCE = np.random.default_rng(0).integers(0, 256, 6 * BUFFER + 5, np.uint8)


@pytest.mark.parametrize("size", [0, BUFFER - 1, BUFFER, BUFFER + 1, SOURCE.size])
def test_files_about_as_large_as_the_buffers(tmp_path: Path, size: int) -> None:
    with ChecksummedFile(tmp_path / "file") as file:
        file.write_array(SOURCE[:size])
    content = SOURCE[:size].tobytes()
    assert (tmp_path / "file").read_bytes() == content
    assert file.checksum == file_checksum(tmp_path / "file") == zlib.crc32(content) and file.position == size


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


def test_bfloat16_is_widened_and_rounded_as_torch_does() -> None:
    words = np.arange(2**16, dtype=np.uint16)
    wide = widen_bfloat16(words)
    np.testing.assert_array_equal(wide, torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).float().numpy())
    # halves, and beyond the largest
    ties = (np.arange(0x7F60, 0x7F90, dtype=np.uint32) << 16) | 0x8000
    any_bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    only_low_payload = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    bits = [any_bits, ties, ties + 1, ties - 1, ties | 0x80000000, only_low_payload, wide.view(np.uint32)]
    values = np.concatenate(bits).view(np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    found, nan = round_to_bfloat16(values), np.isnan(values)
    np.testing.assert_array_equal(found[~nan], expected[~nan])
    assert np.isnan(widen_bfloat16(found[nan])).all()
    assert ((found[nan] >> 15) == (values[nan].view(np.uint32) >> 31)).all()
    assert round_to_bfloat16(values[:6].reshape(2, 3).T).shape == (3, 2)


@pytest.mark.parametrize("shape", [(3, 600), (257, 255), (0, 4), (128, 512), (129, 1025)])
def test_the_bytes_of_a_transposed_matrix(shape: tuple[int, int]) -> None:
    """Shapes are smaller than a tile, as large, and a little larger."""
    array = np.random.default_rng(0).random(shape, np.float32)
    for turned in (array.T, array.T[1:], array[:, ::2].T, array[::2, ::-1].T):
        assert bytes(bytes_of(turned)) == turned.tobytes()
    heads = array[:, : shape[1] // 2 * 2].T.reshape(2, shape[1] // 2, shape[0])
    assert bytes(bytes_of(heads)) == heads.tobytes()


def test_arrays_made_ahead_are_whole_when_they_come() -> None:
    """They are what was made, views too. An error comes in its turn."""
    shapes = [(300, 7), (0, 5), (2, 900), (7, 300), (4,), (), (513, 300)]
    made = [np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) for shape in shapes]

    def broken() -> NDArray[Any]:
        raise OSError("unreadable")

    found = prefetch_arrays([*((lambda array=array: array.T) for array in made), broken])
    for array in made:
        turned = next(found)
        assert turned.base is array.base
        np.testing.assert_array_equal(turned, array.T)
        np.testing.assert_array_equal(np.frombuffer(bytes_of(turned), np.float32), array.T.reshape(-1))
    with pytest.raises(OSError, match="unreadable"):
        next(found)


def test_an_unfinished_reading_ahead_ends_without_a_wait() -> None:
    """Python's garbage collector may end it in a thread that must not wait for another."""
    release = threading.Event()
    timer = threading.Timer(20.0, release.set)
    timer.start()
    found = prefetch_arrays([lambda: np.ones(1), lambda: np.ones(int(release.wait()))])
    assert next(found).tolist() == [1.0]
    found.close()  # type: ignore[attr-defined]
    assert not release.is_set()
    release.set()
    timer.cancel()

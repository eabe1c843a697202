"""Sums of files beside zlib's."""

import zlib
from pathlib import Path

from common.tensor_files.checksummed import ChecksummedFile, file_checksum


def test_sums_are_zlibs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    parts = [b"", b"a", bytes(range(256)) * 5000, b"\xff" * 3]
    with ChecksummedFile(path) as file:
        for part in parts:
            file.write(memoryview(part))
    assert path.read_bytes() == b"".join(parts)
    assert file.checksum == file_checksum(path) == zlib.crc32(b"".join(parts))

"""Manifest of a checkpoint folder: written with a checksum of its own text, checked when read.

The last key of ``manifest.json`` is ``crc32``, the CRC-32 of every byte before the comma in front of it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.structured_files import parse_json, read_bytes
from common.tensor_files.checksummed import file_checksum

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_SUM = "crc32"
_MAX_BYTES = 2**28
"""Maximum size. A thousand ranks, each with rectangles of every tensor, exceed the usual limit of JSON."""
_BEFORE_SUM = f',\n "{_SUM}": '.encode()


def seal(record: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest of the current version, with its checksum."""
    values = {"format_version": FORMAT_VERSION} | {
        key: value for key, value in record.items() if key not in ("format_version", _SUM)
    }
    return _sealed(json.dumps(values, indent=1).encode().removesuffix(b"\n}"))


def _sealed(text: bytes) -> bytes:
    return b"%b%b%d\n}" % (text, _BEFORE_SUM, zlib.crc32(text))


def unseal(content: bytes) -> dict[str, Any]:
    """Return the content of a manifest's text, without its checksum.

    Raises ValueError with the reason for an invalid text.
    """
    version = re.match(rb'\{\s*"format_version": (\d+)', content)
    if version and int(version[1]) != FORMAT_VERSION:
        raise ValueError(f"format version {int(version[1])}, this program reads {FORMAT_VERSION}")
    text, found, _ = content.rpartition(_BEFORE_SUM)
    if not found or _sealed(text) != content:
        raise ValueError("its text has changed since it was written (CRC-32)")
    record: dict[str, Any] = parse_json(content, strict=False)  # of any length
    del record[_SUM]
    return record


def write_manifest(folder: Path, record: Mapping[str, Any]) -> None:
    """Write and fsync the manifest of a folder under its temporary name. Raises OSError."""
    with (folder / MANIFEST).open("wb") as file:
        file.write(seal(record))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path, *, checksums: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are all there and unchanged.

    Without ``checksums`` only the sizes of the files are compared. Raises CheckpointError.
    """
    path = checkpoint / MANIFEST
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: no such file; {checkpoint} is not a checkpoint")
    try:
        manifest = unseal(read_bytes(path, limit=_MAX_BYTES, error=CheckpointError))
    except ValueError as error:
        raise CheckpointError(f"{path}: broken manifest: {error}; use another checkpoint") from None
    check_files(checkpoint, manifest, checksums=checksums)
    return manifest


def check_files(checkpoint: Path, manifest: Mapping[str, Any], *, checksums: bool = True) -> None:
    """Compare the files of a checkpoint with its manifest. Raises CheckpointError."""
    for name, record in manifest["files"].items():
        if not re.fullmatch(r"\w[\w.-]*", name):  # a stranger's checkpoint must not lead out of its folder
            raise CheckpointError(f"{checkpoint / MANIFEST}: names the file {name!r:.60}; use another checkpoint")
        file, size, fault = checkpoint / name, record["bytes"], ""
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):
                fault = f"is not a regular file, expected {size} bytes"
            elif status.st_size != size:
                fault = f"{status.st_size} bytes, expected {size} bytes"
            elif checksums and file_checksum(file) != record["crc32"]:
                fault = "its bytes have changed since it was written (CRC-32)"
        except (FileNotFoundError, NotADirectoryError):
            fault = f"missing, expected {size} bytes"
        except OSError as error:
            raise CheckpointError(
                f"{file}: cannot be read: {error.strerror}; allow this user to read it, try again when"
                " its disk answers, or use another checkpoint"
            ) from None
        if fault:
            raise CheckpointError(f"{file}: {fault}; use another checkpoint")

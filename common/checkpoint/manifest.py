"""Manifest of a checkpoint folder: written with a checksum of its own text, checked when read.

The last key of ``manifest.json`` is ``crc32``, the CRC-32 of every byte before the comma in front of it.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import CheckpointError
from common.structured_files import MalformedError, parse_json, read_bytes, require_mapping
from common.tensor_files.checksummed import file_checksum

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_SUM = "crc32"
_MAX_BYTES = 2**28
"""Maximum size. A thousand ranks, each with rectangles of every tensor, come near the usual
limit.
"""
_BEFORE_SUM = f',\n "{_SUM}": '.encode()


class _Checked(BaseModel):
    """Part of a manifest. Unknown keys are accepted, and most values are left to their reader."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Config(_Checked):
    model: dict[str, Any] = {}


class _File(_Checked):
    size: int = Field(alias="bytes", ge=0)
    crc32: int
    pieces: dict[str, list[list[int]]] = {}


class _Manifest(_Checked):
    state: dict[str, Any]
    engine: dict[str, Any]
    config: _Config
    files: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], _File]
    """Files by name, of the checkpoint's own folder."""


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
    try:
        record = require_mapping(parse_json(content), "the manifest", error=CheckpointError)
    except (MalformedError, CheckpointError) as error:
        raise ValueError(str(error)) from None
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"format version {record.get('format_version')!r}, this program reads {FORMAT_VERSION}")
    text, found, _ = content.rpartition(_BEFORE_SUM)
    if not found or _sealed(text) != content:
        raise ValueError("its text has changed since it was written (CRC-32)")
    del record[_SUM]
    try:
        _Manifest.model_validate(record)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{place}: {fault['msg']}, found {fault['input']!r:.60}") from None
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
        _check_file(checkpoint / name, record, checksums=checksums)


def _check_file(file: Path, record: Mapping[str, int], *, checksums: bool) -> None:
    size = record["bytes"]
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file}: is not a regular file, expected {size} bytes; use another checkpoint")
        if status.st_size != size:
            raise CheckpointError(f"{file}: {status.st_size} bytes, expected {size} bytes; use another checkpoint")
        if checksums and file_checksum(file) != record["crc32"]:
            raise CheckpointError(
                f"{file}: its bytes have changed since it was written (CRC-32); use another checkpoint"
            )
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file}: missing, expected {size} bytes; use another checkpoint") from None
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error.strerror}; allow this user to read it, try again when"
            " its disk answers, or use another checkpoint"
        ) from None

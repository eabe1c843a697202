"""Manifest of a checkpoint folder: written with a checksum of its own text, checked when read.

The last key of ``manifest.json`` is ``crc32``, the CRC-32 of every byte before the comma in front
of it. Version 1 had no such key, and is still read.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import CheckpointError
from common.structured_files import MalformedError, parse_json, read_bytes, require_mapping
from common.tensor_files.checksummed import file_checksum

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_WITHOUT_SUM = 1
_SUM = "crc32"
_MOST_BYTES = 2**28
"""Maximum size. A thousand ranks, each with rectangles of every tensor, come near the usual
limit.
"""
_BEFORE_SUM = f',\n "{_SUM}": '.encode()


# ---- its values ----


def _check_name(name: str) -> str:
    if not name or name in (".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError(
            "expected the name of a file in the checkpoint's folder, without a separator"
        )
    return name


def _check_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None
    return text


def _check_span(span: list[int]) -> list[int]:
    if span[0] > span[1]:
        raise ValueError("expected [first, end] with first <= end")
    return span


Count = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Span = Annotated[list[Count], Field(min_length=2, max_length=2), AfterValidator(_check_span)]


class _Checked(BaseModel):
    """Model of a part of the manifest. Absent keys are left to their reader, and unknown keys are
    accepted.
    """

    model_config = ConfigDict(strict=True, extra="ignore")


class _State(_Checked):
    step: Count = 0
    consumed_samples: Count = 0
    updated_samples: Count = 0
    sample_hash: str = ""
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    losses: list[Finite] = []
    grad_norms: list[Finite] = []
    is_outlier: bool = False
    left_out: list[Span] = []
    rewinds: Count = 0
    rate_factor: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _fits_together(self) -> _State:
        if not self.skipped_in_a_row <= self.skipped_steps <= self.step:
            raise ValueError(
                f"skipped_in_a_row={self.skipped_in_a_row}, skipped_steps={self.skipped_steps} and"
                f" step={self.step} contradict"
            )
        if len(self.losses) != len(self.grad_norms):
            raise ValueError(f"{len(self.losses)} losses and {len(self.grad_norms)} gradient norms")
        return self


class _LossScale(_Checked):
    mode: Literal["none", "dynamic", "static", "auto"] = "none"
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    finite_steps: Count = 0
    overflows: Count = 0


class _Generators(_Checked):
    torch: (
        Annotated[
            list[dict[str, Annotated[str, AfterValidator(_check_base64)]]], Field(min_length=1)
        ]
        | None
    ) = None
    """Entries of every rank: device names and states."""
    mindspore: dict[str, Any] = {}


class _Engine(_Checked):
    optimizer_steps: Count = 0
    loss_scale: _LossScale = _LossScale()
    rng: _Generators = _Generators()


class _Parallel(_Checked):
    data_parallel: Count | None = None
    model_parallel: Count = 1
    pipeline_stage: Count = 1


class _Optimizer(_Checked):
    name: str = ""


class _Config(_Checked):
    model: dict[str, Any] = {}
    optimizer: _Optimizer = _Optimizer()
    parallel: _Parallel = _Parallel()


class _Tokenizer(_Checked):
    kind: str = ""
    vocab_size: Count = 0
    sha256: str = ""


class _File(_Checked):
    size: Count = Field(alias="bytes")
    crc32: Annotated[int, Field(ge=0, lt=2**32)]
    pieces: dict[str, Annotated[list[Span], Field(min_length=1, max_length=2)]] = {}


class _Manifest(_Checked):
    state: _State
    engine: _Engine
    config: _Config
    files: dict[Annotated[str, AfterValidator(_check_name)], _File]
    tokenizer: _Tokenizer | None = None
    samples_per_epoch: Count = 0
    versions: dict[str, str] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> _Manifest:
        parallel, generators = self.config.parallel, self.engine.rng.torch
        if generators is not None and parallel.data_parallel is not None:
            ranks = parallel.data_parallel * parallel.model_parallel * parallel.pipeline_stage
            if len(generators) != ranks:
                raise ValueError(
                    f"engine.rng.torch has the random generators of {len(generators)} ranks, and"
                    f" config.parallel is of {ranks}"
                )
        return self


# ---- its text ----


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
        record = require_mapping(
            parse_json(content, finite=False), "the manifest", error=CheckpointError
        )
    except (MalformedError, CheckpointError) as error:
        raise ValueError(str(error)) from None
    version = record.get("format_version")
    if version not in (_WITHOUT_SUM, FORMAT_VERSION) or type(version) is not int:
        raise ValueError(
            f"format version {version!r}, this program reads {_WITHOUT_SUM} and {FORMAT_VERSION}"
        )
    # version 1 has no such key, so this is a newer manifest with a damaged version
    if version != _WITHOUT_SUM or _SUM in record:
        text, found, _ = content.rpartition(_BEFORE_SUM)
        if not found or _sealed(text) != content:
            raise ValueError("its text has changed since it was written (CRC-32)")
        del record[_SUM]
    try:
        checked = _Manifest.model_validate(record)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"])) or "values"
        shown = (
            ""
            if isinstance(fault["input"], (dict, _Checked))
            else f", found {fault['input']!r:.60}"
        )
        raise ValueError(f"{place}: {fault['msg'].removeprefix('Value error, ')}{shown}") from None
    if (
        version == _WITHOUT_SUM
        and checked.engine.optimizer_steps > checked.state.step
        and "converted_from" not in record
    ):
        raise ValueError(
            f"engine.optimizer_steps={checked.engine.optimizer_steps} is more than"
            f" state.step={checked.state.step}"
        )
    return record


# ---- its file ----


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
        manifest = unseal(read_bytes(path, limit=_MOST_BYTES, error=CheckpointError))
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
            raise CheckpointError(
                f"{file}: is not a regular file, expected {size} bytes; use another checkpoint"
            )
        if status.st_size != size:
            raise CheckpointError(
                f"{file}: {status.st_size} bytes, expected {size} bytes; use another checkpoint"
            )
        if checksums and file_checksum(file) != record["crc32"]:
            raise CheckpointError(
                f"{file}: its bytes have changed since it was written (CRC-32); use another"
                " checkpoint"
            )
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{file}: missing, expected {size} bytes; use another checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error.strerror}; allow this user to read it, try again when"
            " its disk answers, or use another checkpoint"
        ) from None

"""The folder of an export: read its ``export.json`` and check the files against it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.conversion.export import FORMAT_VERSION, RECORD
from common.errors import CheckpointError
from common.files import reading
from common.structured_files import read_json_mapping, shown


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    size: Annotated[int, Field(alias="bytes", ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Tensor(BaseModel):
    model_config = ConfigDict(strict=True)
    shape: Annotated[list[Annotated[int, Field(gt=0)] | str], Field(min_length=1)]
    """Size of each dimension; a name stands for a size that may vary."""


class Graph(BaseModel):
    """A graph of MindIR: its file and its inputs."""

    model_config = ConfigDict(strict=True)
    file: str
    inputs: Annotated[list[_Tensor], Field(min_length=1)]


class ExportRecord(BaseModel):
    """Content of the ``export.json`` that ``--run_mode export`` writes. Other keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: str
    files: Annotated[dict[str, _File], Field(min_length=1)]
    """Files by their path in the folder."""
    model: dict[str, Any]
    """The section model of a config."""
    tokenizer: dict[str, Any] | None = None
    """Kind, vocab_size, sha256 and paths of the tokenizer, as far as known."""
    precision: dict[str, Any] | None = None
    predict: dict[str, Any] | None = None
    """The section predict of the run."""
    graphs: dict[str, Graph] = {}
    """Graphs of a MindIR export, by name."""

    def graph(self, name: str) -> Graph:
        """Return a graph whose file is among those of the record. Raises CheckpointError."""
        found = self.graphs.get(name)
        if found is None or found.file not in self.files:
            raise CheckpointError(f"{RECORD}: graphs: lacks {name}, or its file; export again")
        return found


def read_export(folder: Path, *, verify: bool = False) -> ExportRecord:
    """Read the record of an export whose files are all there with their sizes.

    verify: compare their SHA-256 too. Raises CheckpointError.
    """
    path = folder / RECORD
    fields = read_json_mapping(path, error=CheckpointError)
    version = fields.get("format_version")
    if version != FORMAT_VERSION or type(version) is not int:
        raise CheckpointError(
            f"{path}: format version {shown(version)}, this program reads {FORMAT_VERSION};"
            " export the checkpoint again with this version, or update the toolkit"
        )
    try:
        record = ExportRecord.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise CheckpointError(f"{path}: {place}: {fault['msg']}; export again") from None
    for name, file in record.files.items():
        _check(folder, name, file, verify=verify)
    return record


def _check(folder: Path, name: str, expected: _File, *, verify: bool) -> None:
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute():
        raise CheckpointError(
            f"{folder / RECORD}: names the file {shown(name)}; expected files of its own folder"
        )
    path = folder / name
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing, {RECORD} names it; copy the whole folder, or export again"
        )
    if (size := path.stat().st_size) != expected.size:
        raise CheckpointError(
            f"{path}: {size} bytes, {RECORD} says {expected.size}; copy the folder again, or export"
            " again"
        )
    if not verify:
        return
    with reading(path, CheckpointError), path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != expected.sha256:
        raise CheckpointError(
            f"{path}: its bytes have changed since it was exported (SHA-256 {found[:12]}, {RECORD}"
            f" says {expected.sha256[:12]}); copy the folder again, or export again"
        )

"""Record of the origin of a .bin/.idx pair, in PREFIX.meta.json.

It is optional for readers, because pairs written by Megatron have none.
"""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.files import atomic_write, reading
from common.structured_files import kind_of, read_json_mapping, require_mapping

METADATA_EXTENSION = ".meta.json"
SHARD_OPTION = "shard"
"""Key of ``Metadata.options`` that names the part of a corpus, such as 2/8."""
_FORMAT = "gpt2-toolkit dataset"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One input: file name without folder, size in bytes on disk, and the format it was read as."""

    name: str
    bytes: int
    format: str


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Content of a PREFIX.meta.json.

    tokenizer: its kind. tokenizer_sha256: digest of its vocabulary. eod_id: None if no
    end-of-document token was appended.
    documents, sequences, tokens: counts in the pair. empty_documents: texts without a
    token.
    options: the settings that shaped the content. The number of workers never does.
    """

    tokenizer: str
    vocab_size: int
    tokenizer_sha256: str
    eod_id: int | None
    documents: int
    sequences: int
    tokens: int
    empty_documents: int
    sources: tuple[SourceFile, ...]
    options: dict[str, str | bool] = field(default_factory=dict)


def write_metadata(path: Path, metadata: Metadata) -> None:
    """Write the record beside the pair. Raises StorageError if the disk fails."""
    with atomic_write(path, "w") as file:
        json.dump(
            {"format": _FORMAT, "version": _VERSION, **asdict(metadata)},
            file,
            ensure_ascii=False,
            indent=1,
        )
        file.write("\n")


def read_metadata(path: Path) -> Metadata | None:
    """Return the record, or None without the file.

    Raises DataError for a file that ``write_metadata`` would not write.
    """
    with reading(path, DataError):
        if not os.path.lexists(path):
            return None
    try:
        raw = read_json_mapping(path, error=DataError)
        if raw.pop("format", None) != _FORMAT or raw.pop("version", None) != _VERSION:
            raise DataError(f"{path}: format must be {_FORMAT!r} and version {_VERSION}")
        _require(Metadata, raw, str(path))
        for source in raw["sources"]:
            _require(
                SourceFile,
                require_mapping(source, f"{path}: sources", error=DataError),
                f"{path}: sources",
            )
    except DataError as error:
        raise DataError(
            f"{error}; the file does not describe token files: delete it (it is optional) or"
            " preprocess again"
        ) from None
    return Metadata(**{**raw, "sources": tuple(SourceFile(**source) for source in raw["sources"])})


def _require(kind: type[Metadata | SourceFile], raw: dict[str, Any], where: str) -> None:
    """Raise DataError unless ``raw`` has the keys of a dataclass, with values of their types."""
    names = {item.name: item for item in fields(kind)}
    if unknown := raw.keys() - names.keys():
        raise DataError(f"{where}: unknown keys {', '.join(sorted(unknown))[:80]}")
    for name, item in names.items():
        if name not in raw and item.default_factory is not MISSING:
            continue
        if name not in raw or not _fits(raw[name], str(item.type)):
            found = kind_of(raw[name]) if name in raw else "nothing"
            raise DataError(f"{where}: {name}: expected {_EXPECTED[str(item.type)]}, found {found}")


_EXPECTED = {
    "str": "text",
    "int": "a whole number from 0 on",
    "int | None": "a whole number from 0 on, or null",
    "tuple[SourceFile, ...]": "a list",
    "dict[str, str | bool]": "keys and values",
}


def _fits(value: Any, annotation: str) -> bool:
    if annotation.startswith("int"):
        return (type(value) is int and 0 <= value < 2**63) or (
            value is None and "None" in annotation
        )
    return isinstance(value, {"s": str, "t": list, "d": dict}[annotation[0]])

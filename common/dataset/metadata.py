"""Record of the origin of a .bin/.idx pair, in PREFIX.meta.json.

It is optional for readers, because pairs written by Megatron have none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from common.errors import DataError
from common.files import atomic_write, reading
from common.structured_files import read_json_mapping

METADATA_EXTENSION = ".meta.json"
SHARD_OPTION = "shard"
"""Key of ``Metadata.options`` that names the part of a corpus, such as 2/8."""
_FORMAT = "gpt2-toolkit dataset"
_VERSION = 1
Kind = TypeVar("Kind", "Metadata", "SourceFile")


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
        metadata = _made(Metadata, raw)
        files: list[Any] = list(metadata.sources)
        sources = tuple(_made(SourceFile, dict(file)) for file in files)
    except (DataError, TypeError, ValueError) as error:
        where = "" if isinstance(error, DataError) else f"{path}: "
        raise DataError(
            f"{where}{str(error)[:200]}; the file does not describe token files: delete it (it is"
            " optional) or preprocess again"
        ) from None
    return replace(metadata, sources=sources)


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "int | None": (int, type(None)),
    "tuple[SourceFile, ...]": (list,),
    "dict[str, str | bool]": (dict,),
}


def _made(kind: type[Kind], raw: dict[str, Any]) -> Kind:
    """Return a dataclass of its fields. Raises TypeError for others or for values of other
    types.
    """
    if unknown := raw.keys() - {item.name for item in fields(kind)}:
        raise TypeError(f"unknown keys {', '.join(sorted(unknown))}")
    made = kind(**raw)
    for item in fields(kind):
        value = getattr(made, item.name)
        fits = type(value) in _TYPES[str(item.type)]
        if not fits or (type(value) is int and not 0 <= value < 2**63):
            raise TypeError(f"{item.name}: expected {item.type}, found {str(value)[:40]!r}")
    return made

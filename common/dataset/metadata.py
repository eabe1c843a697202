"""Record of the origin of a .bin/.idx pair, in PREFIX.meta.json.

It is optional for readers, because pairs written by Megatron have none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.files import atomic_write, reading
from common.structured_files import read_json_mapping, require_mapping

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
        json.dump({"format": _FORMAT, "version": _VERSION, **asdict(metadata)}, file, ensure_ascii=False, indent=1)
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
        if unknown := ", ".join(raw.keys() - {each.name for each in fields(Metadata)}):
            raise TypeError(f"unknown keys {unknown[:100]}")
        metadata = Metadata(**raw)
        counts = (metadata.documents, metadata.sequences, metadata.tokens, metadata.empty_documents)
        eod = () if metadata.eod_id is None else (metadata.eod_id,)
        for number in (*counts, metadata.vocab_size, *eod):
            if type(number) is not int or not 0 <= number < 2**63:
                raise TypeError(f"{str(number)[:40]!r} where a whole number is expected")
        if not type(metadata.tokenizer) is type(metadata.tokenizer_sha256) is str:
            raise TypeError("a tokenizer or a digest that is no text")
        options = require_mapping(metadata.options, f"{path}: options", error=DataError)
        files: list[Any] = list(metadata.sources)
        sources = tuple(SourceFile(**each) for each in files)
    except (DataError, TypeError) as error:
        where = "" if isinstance(error, DataError) else f"{path}: "
        raise DataError(
            f"{where}{str(error)[:200]}; the file does not describe token files: delete it (it is"
            " optional) or preprocess again"
        ) from None
    return replace(metadata, sources=sources, options=options)

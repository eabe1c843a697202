"""PREFIX.meta.json: what made a .bin/.idx pair. Readers must do without it: pairs written by Megatron have none."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from common.errors import DataError
from common.files import atomic_write

METADATA_EXTENSION = ".meta.json"
_FORMAT = "gpt2-toolkit dataset"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One input: its file name without folder, its size in bytes on disk, the format it was read as."""

    name: str
    bytes: int
    format: str


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """tokenizer: its kind. tokenizer_sha256: of its vocabulary. eod_id: None when no end-of-document token was appended.

    documents, sequences, tokens: counts in the pair; empty_documents: those skipped on the way.
    options: the settings that shaped the content (not the number of workers: it never does).
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
    """Raises StorageError when the disk refuses."""
    with atomic_write(path, "w") as file:
        json.dump({"format": _FORMAT, "version": _VERSION, **asdict(metadata)}, file, ensure_ascii=False, indent=1)
        file.write("\n")


def read_metadata(path: Path) -> Metadata | None:
    """None when there is no such file. Raises DataError when it is not what ``write_metadata`` writes."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 at byte {error.start}; delete the file (it is optional) or preprocess again") from None
    try:
        raw = json.loads(text)
        if raw.pop("format") != _FORMAT or raw.pop("version") != _VERSION:
            raise ValueError(f"format must be {_FORMAT!r} and version {_VERSION}")
        raw["sources"] = tuple(SourceFile(**source) for source in raw["sources"])
        unknown = set(raw) - {item.name for item in fields(Metadata)}
        if unknown:
            raise ValueError(f"unknown keys {sorted(unknown)}")
        return Metadata(**raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: does not describe token files ({error}); delete the file (it is optional) or preprocess again") from None

"""Join .bin/.idx pairs into one, in constant memory.

The result of all shards of a corpus has the bytes that one process would have written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.dataset.indexed import IndexedDataset, IndexedWriter, require_pair, strip_extension
from common.dataset.metadata import METADATA_EXTENSION, SHARD_OPTION, Metadata, read_metadata, write_metadata
from common.dataset.token_files import CHUNK, with_extension
from common.errors import DataError
from common.files import reading, refuse_to_overwrite

_SHARD = re.compile("[0-9]{1,6}/[0-9]{1,6}")
_SHAPING = ("tokenizer", "vocab_size", "tokenizer_sha256", "eod_id")


class _Part(NamedTuple):
    """One pair. A shard without a token has no ``data``, and may have empty documents."""

    prefix: Path
    metadata: Metadata | None
    data: IndexedDataset | None


def merge_datasets(
    inputs: Sequence[Path], output: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the pair ``output``, and its record if all inputs have one.

    inputs: prefixes, or folders whose pairs are taken by name. Shards are sorted by their number,
    and all must be there. on_progress: called with the bytes of tokens copied, and of all.
    Raises DataError for pairs that do not belong together, and StorageError.
    """
    prefixes: list[Path] = []
    for path in inputs:
        pairs = list(path.glob("*.idx")) if path.is_dir() else [path]
        if not pairs:
            raise DataError(f"{path}: holds no .idx; name a folder of pairs, or the pairs")
        prefixes += sorted(map(strip_extension, pairs))
    if twice := next((path for path in prefixes if prefixes.count(path) > 1), None):
        raise DataError(f"{twice}: is named twice; name each pair once")
    parts = _in_order(list(map(_open, prefixes)))
    _require_one_kind(parts)
    output = strip_extension(output)
    extensions = (".bin", ".idx", METADATA_EXTENSION)
    refuse_to_overwrite(
        [with_extension(part.prefix, extension) for part in parts for extension in extensions],
        [with_extension(output, extension) for extension in extensions],
        "choose another --output-prefix",
    )
    full = [part.data for part in parts if part.data is not None]
    if not full:
        raise DataError(f"{parts[0].prefix}: no pair has a document; check the corpus")
    total = sum(data.tokens.nbytes for data in full)
    with IndexedWriter(output, full[0].dtype) as writer:
        for part in parts:
            if part.data is not None:
                writer.append_pair(part.data)
            elif part.metadata is not None:
                empty = np.zeros(part.metadata.documents, np.int32)
                writer.append(np.zeros(0, writer.dtype), empty[:0], empty)
            on_progress(writer.token_count * writer.dtype.itemsize, total)
    if (metadata := _joined(parts)) is not None:
        write_metadata(with_extension(output, METADATA_EXTENSION), metadata)


def _open(prefix: Path) -> _Part:
    with reading(prefix, DataError):
        require_pair(prefix)
        metadata = read_metadata(with_extension(prefix, METADATA_EXTENSION))
    if metadata is not None and metadata.sequences == 0 and SHARD_OPTION in metadata.options:
        return _Part(prefix=prefix, metadata=metadata, data=None)
    data = IndexedDataset(prefix)
    data.check(lambda length: [slice(start, start + CHUNK) for start in range(0, length, CHUNK)])
    return _Part(prefix=prefix, metadata=metadata, data=data)


def _in_order(parts: list[_Part]) -> list[_Part]:
    """Return shards by their numbers, other pairs as they are."""
    named = [part.metadata.options.get(SHARD_OPTION) if part.metadata else None for part in parts]
    if not any(named):
        return parts
    numbers: dict[int, _Part] = {}
    counts = {str(name).partition("/")[2] for name in named}
    for part, name in zip(parts, named, strict=True):
        if name is None or len(counts) > 1 or not _SHARD.fullmatch(str(name)):
            raise DataError(
                f"{part.prefix}: is {f'shard {name}' if name else 'not a shard'}, but others, or those of this"
                " release, are of another division; merge the shards of one run of --shard by themselves, or preprocess"
                " all again"
            )
        number = int(str(name).partition("/")[0])
        if number in numbers:
            raise DataError(f"{part.prefix} and {numbers[number].prefix}: both are shard {name}; name one")
        numbers[number] = part
    count = int(counts.pop())
    missing = [str(number) for number in range(1, count + 1) if number not in numbers]
    if missing:
        raise DataError(
            f"{parts[0].prefix}: shards {', '.join(missing[:10])} of {count} are missing;"
            f" preprocess them with --shard {missing[0]}/{count}, and name all"
        )
    return [numbers[number] for number in sorted(numbers)]


def _require_one_kind(parts: Sequence[_Part]) -> None:
    """Raise DataError unless tokens have one type, tokenizer and, for shards, one corpus."""
    first = parts[0]
    for part in parts[1:]:
        mine, theirs = part.metadata, first.metadata
        if mine is not None and theirs is not None:
            for name in _SHAPING:
                if getattr(mine, name) != getattr(theirs, name):
                    raise DataError(
                        f"{part.prefix}: {name} is {getattr(mine, name)}, but"
                        f" {getattr(theirs, name)} in {first.prefix}; preprocess with one tokenizer"
                    )
            if SHARD_OPTION in mine.options and (_options(mine) != _options(theirs) or mine.sources != theirs.sources):
                raise DataError(
                    f"{part.prefix}: was made with other options or inputs than {first.prefix};"
                    " preprocess this shard again"
                )
    full = [part.data for part in parts if part.data is not None]
    for data in full[1:]:
        if data.dtype != full[0].dtype:
            raise DataError(
                f"{data.prefix}: has tokens of {data.dtype.name}, but {full[0].dtype.name} in {full[0].prefix};"
                " preprocess both with one tokenizer"
            )


def _options(metadata: Metadata) -> dict[str, str | bool]:
    """Return the options without the name of a shard."""
    return {name: value for name, value in metadata.options.items() if name != SHARD_OPTION}


def _joined(parts: Sequence[_Part]) -> Metadata | None:
    """Return the record of the whole; shards have their sources in common."""
    records = [part.metadata for part in parts if part.metadata is not None]
    if len(records) < len(parts):
        return None
    first = records[0]
    sharded = SHARD_OPTION in first.options
    options = _options(first)
    return replace(
        first,
        documents=sum(each.documents for each in records),
        sequences=sum(each.sequences for each in records),
        tokens=sum(each.tokens for each in records),
        empty_documents=sum(each.empty_documents for each in records),
        sources=first.sources if sharded else tuple(source for each in records for source in each.sources),
        options=options if all(_options(each) == options for each in records) else {},
    )

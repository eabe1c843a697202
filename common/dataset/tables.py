"""Texts in columns of parquet files and Arrow files, read by pyarrow a few MB at a time.

Formats: Apache Parquet, and the streaming and file formats of Arrow IPC. Hugging Face's
``datasets`` writes streams.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.dataset.limits import WORD_CHARACTERS, check_words
from common.dataset.shards import Share
from common.errors import DataError
from common.paths import require_package

PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"
_END_OF_STREAM = ARROW_STREAM_MAGIC + bytes(4)
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 256, 4 << 20
"""Maximum rows and bytes taken together: a few values of a dictionary can stand for any number of
rows.
"""
_BUFFER_BYTES = 1 << 20

Texts = list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class TableBlock:
    """Texts of consecutive rows, one per key. read_bytes: their part of the file."""

    texts: Texts
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Row group or record batch: ``count`` rows between the bytes ``start`` and ``stop``.

    batches: function that returns its record batches in order.
    """

    count: int
    start: int
    stop: int
    batches: Callable[[], Iterator[Any]]

    def byte_of(self, row: int) -> int:
        """Return the place in the file of a row of this group, as if rows had equal sizes."""
        return self.start + (self.stop - self.start) * row // max(self.count, 1)


def require_pyarrow(path: Path) -> None:
    """Raise ConfigError unless pyarrow is installed. path: the file that needs it."""
    require_package("pyarrow", extra="parquet", purpose=f"which reads {path}")


def check_table(path: Path, keys: tuple[str, ...]) -> None:
    """Raise DataError unless the file is whole and has a column of strings for each key."""
    require_pyarrow(path)
    with _opened(path) as (schema, _):
        _check_columns(path, schema, keys)


def read_table(
    path: Path,
    size: int,
    keys: tuple[str, ...],
    *,
    block_bytes: int,
    document_bytes: int,
    share: Share | None = None,
) -> Iterator[TableBlock]:
    """Yield the rows of a file in order, about ``block_bytes`` of text at a time.

    size: bytes of the file. keys: columns of strings. share: rows to read; None reads all.
    Memory: a block, and a page of a column or a batch that is mapped from the file.
    Raises DataError as ``check_table`` does, and for a null, for text that is not UTF-8 and for
    more than ``document_bytes`` in one row.
    """
    check_table(path, keys)
    texts: Texts = []
    held = read = 0
    with _opened(path) as (_, groups):
        first = 0
        for group in groups(size, keys, block_bytes):
            rows = range(group.count)
            if share is not None:

                def side(row: int, group: _Group = group, share: Share = share) -> int:
                    return share.side_of(group.byte_of(row))

                rows = rows[bisect_left(rows, 0, key=side) : bisect_right(rows, 0, key=side)]
            for row, part in _parts(group, rows, keys):
                found = _texts_of(part, path, first + row, document_bytes)
                texts += found
                held += sum(len(text) for each in found for text in each)
                read += group.byte_of(row + len(found)) - group.byte_of(row)
                if held >= block_bytes:
                    yield TableBlock(texts=texts, read_bytes=read)
                    texts, held, read = [], 0, 0
            first += group.count
    if texts:
        yield TableBlock(texts=texts, read_bytes=read)


def _parts(group: _Group, rows: range, keys: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    """Yield a few rows at a time, and the number of the first in its group."""
    row = 0
    for batch in group.batches() if rows else ():
        columns = batch.select(list(keys))
        step = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * len(columns) // (columns.nbytes or 1)))
        for at in range(max(row, rows.start), min(row + batch.num_rows, rows.stop), step):
            yield at, columns.slice(at - row, min(step, rows.stop - at))
        row += batch.num_rows
        if row >= rows.stop:
            return


def _texts_of(batch: Any, path: Path, first: int, document_bytes: int) -> Texts:
    """Return the texts of a record batch. first: number of its first row, for messages."""
    columns = []
    for key, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            texts = column.to_pylist()
        except UnicodeDecodeError:
            if len(column) > 1:  # to find the row
                for row in range(len(column)):
                    _texts_of(batch.slice(row, 1), path, first + row, document_bytes)
            raise DataError(
                f"{path}: row {first} (from 0): the text in column {key!r} is not UTF-8; write the"
                " column as text again"
            ) from None
        for row, text in enumerate(texts, first):
            if text is not None and 4 * len(text) <= document_bytes and len(text) < WORD_CHARACTERS:
                continue  # the usual case, without a message
            where = f"{path}: row {row} (from 0)"
            if text is None:
                raise DataError(
                    f"{where}: the value in column {key!r} is null, expected a string; fix or"
                    " remove this row"
                )
            if 4 * len(text) > document_bytes < len(text.encode()):
                raise DataError(
                    f"{where}: the text in column {key!r} has more than"
                    f" {document_bytes / 2**20:g} MiB, but must fit in memory whole; divide it, or"
                    " allow more: --max-document-mib N"
                )
            check_words(text, where)
        columns.append(texts)
    return list(zip(*columns, strict=True))


def _check_columns(path: Path, schema: Any, keys: tuple[str, ...]) -> None:
    import pyarrow as pa

    strings = (pa.string(), pa.large_string(), pa.string_view())
    for key in keys:
        count = schema.names.count(key)
        if count != 1:
            present = ", ".join(map(repr, schema.names[:10])) or "none"
            problem = "is missing" if count == 0 else f"is there {count} times"
            raise DataError(
                f"{path}: the column {key!r} {problem}, the columns present are {present}; name"
                " another with --json-keys, or rename it"
            )
        kind = schema.field(key).type
        if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in strings:
            raise DataError(
                f"{path}: the column {key!r} holds {kind}, expected strings; name another with"
                " --json-keys, or convert it"
            )


_Groups = Callable[[int, tuple[str, ...], int], Iterator[_Group]]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, _Groups]]:
    """Yield the schema of a file, and a function that iterates over its groups.

    Within the block, errors of pyarrow become DataError.
    """
    import pyarrow as pa

    with path.open("rb") as file:
        magic = file.read(8)
    is_parquet = magic.startswith(PARQUET_MAGIC)
    try:
        with _parquet(path) if is_parquet else _arrow(path, magic == ARROW_FILE_MAGIC) as found:
            yield found
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise DataError(
            f"{path}: cannot be read as {'parquet' if is_parquet else 'Arrow'} ({reason}); it may"
            " be cut short or broken: copy or write it again"
        ) from None


@contextmanager
def _parquet(path: Path) -> Iterator[tuple[Any, _Groups]]:
    from pyarrow import parquet

    # a buffer: otherwise a whole column of a row group is read at once
    with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:

        def groups(size: int, keys: tuple[str, ...], block_bytes: int) -> Iterator[_Group]:
            first, total = 0, max(1, file.metadata.num_rows)
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                held = group.total_byte_size // max(1, group.num_rows)
                yield _Group(
                    count=group.num_rows,
                    start=size * first // total,
                    stop=size * (first + group.num_rows) // total,
                    batches=partial(
                        file.iter_batches,
                        min(_ROWS_AT_ONCE, max(1, block_bytes // max(1, held))),
                        row_groups=[number],
                        columns=list(keys),
                        use_threads=False,
                    ),
                )
                first += group.num_rows

        yield file.schema_arrow, groups


@contextmanager
def _arrow(path: Path, is_file: bool) -> Iterator[tuple[Any, _Groups]]:
    """Open Arrow's file format or its stream, which pyarrow.dataset does not read."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        size = source.size()
        if not is_file and source.read_at(8, max(0, size - 8)) != _END_OF_STREAM:
            raise EOFError("the mark at the end of the stream is missing")
        with (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source) as reader:

            def groups(size: int, keys: tuple[str, ...], block_bytes: int) -> Iterator[_Group]:
                count = reader.num_record_batches if is_file else None
                start = number = 0
                while number != count:
                    try:
                        batch = reader.get_batch(number) if is_file else reader.read_next_batch()
                    except StopIteration:
                        return
                    number += 1
                    at = source.tell()
                    ends = size - at <= len(_END_OF_STREAM)
                    stop = size * number // count if count else size if ends else at
                    yield _Group(
                        count=batch.num_rows,
                        start=start,
                        stop=stop,
                        batches=partial(iter, (batch,)),
                    )
                    start = stop

            yield reader.schema, groups

"""Texts in columns of parquet files and Arrow files, read by pyarrow a few MB at a time.

Formats: Apache Parquet, and the streaming and file formats of Arrow IPC. Hugging Face's
``datasets`` writes streams.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.dataset.limits import check_words
from common.dataset.shards import Share
from common.errors import DataError
from common.packages import require_package

PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"
_END_OF_STREAM = ARROW_STREAM_MAGIC + bytes(4)
_ROWS_AT_ONCE = 256
"""Rows that are taken together, at most.

A few values of a parquet dictionary can stand for any number of rows.
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
    """Rows that lie together in a file: a row group or a record batch.

    first: number of its first row in the file. start, stop: its place among the bytes of the file.
    batches: function that returns the record batches of the group in order.
    """

    first: int
    count: int
    start: int
    stop: int
    batches: Callable[[], Iterator[Any]]

    def byte_of(self, row: int) -> int:
        """Return the place in the file of a row of this group, as if rows had equal sizes."""
        return self.start + (self.stop - self.start) * row // max(self.count, 1)

    def rows_of(self, share: Share | None) -> range:
        """Return the rows of this group that belong to a share; None is the whole corpus."""
        rows = range(self.count)
        if share is None:
            return rows

        def side(row: int) -> int:
            return share.side_of(self.byte_of(row))

        return range(bisect_left(rows, 0, key=side), bisect_right(rows, 0, key=side))


def require_pyarrow(path: Path) -> None:
    """Raise ConfigError unless pyarrow is installed. path: the file that needs it."""
    require_package("pyarrow", extra="parquet", purpose=f"which reads {path}")


def check_table(path: Path, keys: tuple[str, ...]) -> None:
    """Raise DataError unless the file is whole and has a column of strings for each key."""
    require_pyarrow(path)
    with _readable(path), _opened(path) as (schema, _):
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
    held = start = stop = 0
    for piece, begin, end in _pieces(path, size, keys, share, block_bytes, document_bytes):
        if not texts:
            start = begin
        texts += piece
        held += sum(len(text) for each in piece for text in each)
        stop = end
        if held >= block_bytes:
            yield TableBlock(texts=texts, read_bytes=stop - start)
            texts, held = [], 0
    if texts:
        yield TableBlock(texts=texts, read_bytes=stop - start)


def _pieces(
    path: Path,
    size: int,
    keys: tuple[str, ...],
    share: Share | None,
    block_bytes: int,
    document_bytes: int,
) -> Iterator[tuple[Texts, int, int]]:
    """Yield the texts of a few rows at a time, and the bytes between which they lie."""
    with _readable(path), _opened(path) as (_, groups):
        for group in groups(size, keys, block_bytes):
            if share is not None and share.side_of(group.start) > 0:
                return
            rows = group.rows_of(share)
            row = 0
            for batch in group.batches() if rows else ():
                before = min(batch.num_rows, max(0, rows.start - row))
                columns = batch.select(list(keys)).slice(before)
                row += before
                for part in _divided(columns.slice(0, rows.stop - row), block_bytes):
                    found = _texts_of(part, path, group.first + row, document_bytes)
                    yield found, group.byte_of(row), group.byte_of(row + len(found))
                    row += len(found)
                if row >= rows.stop:
                    break


def _divided(batch: Any, most_bytes: int) -> Iterator[Any]:
    """Yield parts of a record batch that are small enough to become Python's strings at once."""
    rows = batch.num_rows
    if rows > _ROWS_AT_ONCE or (rows > 1 and batch.nbytes > most_bytes):
        yield from _divided(batch.slice(0, rows // 2), most_bytes)
        yield from _divided(batch.slice(rows // 2), most_bytes)
    elif rows:
        yield batch


def _texts_of(batch: Any, path: Path, first: int, document_bytes: int) -> Texts:
    """Return the texts of a record batch. first: number of its first row, for messages."""
    columns = []
    for key, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            texts = column.to_pylist()
        except UnicodeDecodeError:
            row = next(row for row in range(len(column)) if not _is_utf8(column[row]))
            raise DataError(
                f"{path}: row {first + row} (from 0): the text in column {key!r} is not UTF-8;"
                " write the column as text again"
            ) from None
        for row, text in enumerate(texts, first):
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


def _is_utf8(value: Any) -> bool:
    try:
        value.as_py()
    except UnicodeDecodeError:
        return False
    return True


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
    """Yield the schema of a file, and a function that iterates over its groups."""
    with path.open("rb") as file:
        magic = file.read(8)
    if magic.startswith(PARQUET_MAGIC):
        opened = _parquet
    else:
        opened = _arrow_file if magic == ARROW_FILE_MAGIC else _arrow_stream
    with opened(path) as found:
        yield found


@contextmanager
def _parquet(path: Path) -> Iterator[tuple[Any, _Groups]]:
    from pyarrow import parquet

    # a buffer: otherwise a whole column of a row group is read at once
    with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:

        def groups(size: int, keys: tuple[str, ...], block_bytes: int) -> Iterator[_Group]:
            first, total = 0, max(1, file.metadata.num_rows)
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                columns = (group.column(index) for index in range(group.num_columns))
                held = sum(
                    column.total_uncompressed_size
                    for column in columns
                    if column.path_in_schema in keys
                )
                row_bytes = max(1, held // max(1, group.num_rows))
                rows_at_once = min(_ROWS_AT_ONCE, max(1, block_bytes // row_bytes))

                def batches(number: int = number, rows: int = rows_at_once) -> Iterator[Any]:
                    found = file.iter_batches(
                        rows, row_groups=[number], columns=list(keys), use_threads=False
                    )
                    yield from found

                last = first + group.num_rows
                yield _Group(
                    first=first,
                    count=group.num_rows,
                    start=size * first // total,
                    stop=size * last // total,
                    batches=batches,
                )
                first = last

        yield file.schema_arrow, groups


@contextmanager
def _arrow_file(path: Path) -> Iterator[tuple[Any, _Groups]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:

        def groups(size: int, keys: tuple[str, ...], block_bytes: int) -> Iterator[_Group]:
            first, total = 0, file.num_record_batches
            for number in range(total):
                batch = file.get_batch(number)
                place = size * number // total, size * (number + 1) // total
                yield _group(batch, first, *place)
                first += batch.num_rows

        yield file.schema, groups


@contextmanager
def _arrow_stream(path: Path) -> Iterator[tuple[Any, _Groups]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        size = source.size()
        if source.read_at(len(_END_OF_STREAM), max(0, size - len(_END_OF_STREAM))) != (
            _END_OF_STREAM
        ):
            raise EOFError("the mark at the end of the stream is missing")
        with pa.ipc.open_stream(source) as stream:

            def groups(size: int, keys: tuple[str, ...], block_bytes: int) -> Iterator[_Group]:
                first = start = 0  # the schema counts to the first rows, the end to the last
                for batch in stream:
                    at = source.tell()
                    stop = size if size - at <= len(_END_OF_STREAM) else at
                    yield _group(batch, first, start, stop)
                    first, start = first + batch.num_rows, stop

            yield stream.schema, groups


def _group(batch: Any, first: int, start: int, stop: int) -> _Group:
    return _Group(
        first=first,
        count=batch.num_rows,
        start=start,
        stop=stop,
        batches=lambda: iter((batch,)),
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of pyarrow into DataError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise DataError(
            f"{path}: cannot be read as {_kind(path)} ({reason}); it may be cut short or broken:"
            " copy or write it again"
        ) from None


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return "parquet" if file.read(4) == PARQUET_MAGIC else "Arrow"
    except OSError:
        return "a table"

"""Texts in columns of parquet files and Arrow files, read by pyarrow a few MB at a time.

Formats: Apache Parquet, and the streaming and file formats of Arrow IPC. Hugging Face's ``datasets`` writes streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common.errors import DataError

PARQUET_MAGIC, ARROW_FILE_MAGIC, ARROW_STREAM_MAGIC = b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff"
_END_OF_STREAM = ARROW_STREAM_MAGIC + bytes(4)
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 256, 4 << 20
"""Maximum rows and bytes taken together: a few values of a dictionary can stand for any number of rows."""
_BUFFER_BYTES = 1 << 20

Texts = list[tuple[str, ...]]


def check_table(path: Path, keys: tuple[str, ...]) -> None:
    """Raise DataError unless the file is whole and has a column of strings for each key."""
    with _opened(path, keys, 1):
        pass


def read_table(
    path: Path, size: int, keys: tuple[str, ...], *, block_bytes: int, document_bytes: int
) -> Iterator[tuple[Texts, int]]:
    """Yield the texts of consecutive rows, one per key, and their part of the file in bytes, about
    ``block_bytes`` of text at a time.

    size: bytes of the file. keys: columns of strings.
    Memory: a block, and a page of a column or a batch that is mapped from the file.
    Raises DataError as ``check_table`` does, and for a null, for text that is not UTF-8 and for
    more than ``document_bytes`` in one row.
    """
    texts: Texts = []
    first = held = told = 0
    with _opened(path, keys, block_bytes) as batches:
        for batch, start, stop in batches:
            columns, rows = batch.select(list(keys)), batch.num_rows
            step = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE * rows // (columns.nbytes or 1)))
            for row in range(0, rows, step):
                part = columns.slice(row, step)
                found = _texts_of(part, path, first + row, document_bytes)
                texts += found
                held += sum(len(text) for each in found for text in each)
                if held >= block_bytes:
                    at = start + (stop - start) * (row + len(found)) // rows
                    yield texts, at - told
                    texts, held, told = [], 0, at
            first += rows
    if texts:
        yield texts, size - told


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
                f"{path}: row {first} (from 0): the text in column {key!r} is not UTF-8; write the column as text again"
            ) from None
        for row, text in enumerate(texts, first):
            if text is None:
                raise DataError(
                    f"{path}: row {row} (from 0): the value in column {key!r} is null, expected a string; fix or remove"
                    " this row"
                )
            if 4 * len(text) > document_bytes < len(text.encode()):
                raise DataError(
                    f"{path}: row {row} (from 0): the text in column {key!r} has more than"
                    f" {document_bytes / 2**20:g} MiB, but must fit in memory whole; divide it, or"
                    " allow more: --max-document-mib N"
                )
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


@contextmanager
def _opened(path: Path, keys: tuple[str, ...], block_bytes: int) -> Iterator[Iterator[tuple[Any, int, int]]]:
    """Yield the record batches of a file that has the columns ``keys``, each with the bytes of the file between which
    it lies. block_bytes: about the bytes of a batch of parquet.

    Within the block, errors of pyarrow become DataError.
    """
    import pyarrow as pa
    from pyarrow import parquet

    with path.open("rb") as opened:
        magic = opened.read(8)
    is_parquet = magic.startswith(PARQUET_MAGIC)
    try:
        with ExitStack() as stack:
            if is_parquet:
                # a buffer: otherwise a whole column of a row group is read at once
                options = {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
                file = stack.enter_context(parquet.ParquetFile(path, **options))
                schema, batches = file.schema_arrow, _of_parquet(file, path.stat().st_size, keys, block_bytes)
            else:  # Arrow's stream, which its file format holds between a mark and a footer
                is_file = magic == ARROW_FILE_MAGIC
                end = ARROW_FILE_MAGIC[:6] if is_file else _END_OF_STREAM
                source = stack.enter_context(pa.memory_map(str(path)))
                if source.read_at(len(end), max(0, source.size() - len(end))) != end:
                    raise EOFError("the mark at the end of the stream is missing")
                source.seek(len(magic) if is_file else 0)
                reader = stack.enter_context(pa.ipc.open_stream(source))
                schema, batches = reader.schema, _of_arrow(reader, source)
            _check_columns(path, schema, keys)
            yield batches
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, SystemError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise DataError(
            f"{path}: cannot be read as {'parquet' if is_parquet else 'Arrow'} ({reason}); it may"
            " be cut short or broken: copy or write it again"
        ) from None


def _of_parquet(file: Any, size: int, keys: tuple[str, ...], block_bytes: int) -> Iterator[tuple[Any, int, int]]:
    first, total = 0, max(1, file.metadata.num_rows)
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        held = max(1, group.total_byte_size // max(1, group.num_rows))
        count = min(_ROWS_AT_ONCE, max(1, block_bytes // held))
        for batch in file.iter_batches(count, [number], list(keys), use_threads=False):
            last = first + batch.num_rows
            yield batch, size * first // total, size * last // total
            first = last


def _of_arrow(reader: Any, source: Any) -> Iterator[tuple[Any, int, int]]:
    start = source.tell()
    for batch in reader:
        stop = source.tell()
        yield batch, start, stop
        start = stop

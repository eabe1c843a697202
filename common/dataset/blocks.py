"""Cut a corpus into blocks of a few MB at document borders.

A block can be parsed and tokenized with no knowledge of the others.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from common.dataset.corpus import TABLES, Corpus, CorpusFormat
from common.dataset.json_array import array_items
from common.dataset.limits import DOCUMENT_BYTES, check_words
from common.dataset.tables import Texts, read_table
from common.errors import DataError

BLOCK_BYTES = 4 << 20
END_OF_TEXT = "<|endoftext|>"
BLANK_LINES = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")


class MissingKeyError(DataError):
    """Error for an item without the key asked for.

    problem: the message without the advice, which concerns preprocessing.
    """

    @property
    def problem(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.problem}; rename it, or name it with --json-keys"


class DocumentRule(enum.Enum):
    """Border between the documents of a plain text."""

    BLANK_LINE = "blank_line"
    LINE = "line"
    FILE = "file"
    EOT = "eot"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Whole documents of one file.

    data: bytes of a text or of JSON Lines. For an array or a table it is a tuple of texts per
    item, in the order of the keys.
    first_line (from 1) and offset (bytes of uncompressed text): place where data starts.
    read_bytes: bytes taken from disk for it.
    """

    path: Path
    format: CorpusFormat
    rule: DocumentRule
    data: bytes | Texts
    first_line: int
    offset: int
    read_bytes: int


class _LargeDocument(Exception):
    """Signal that a document has more bytes than allowed."""


def read_blocks(
    corpus: Corpus,
    rule: DocumentRule,
    keys: tuple[str, ...],
    block_bytes: int = BLOCK_BYTES,
    document_bytes: int = DOCUMENT_BYTES,
    end_id: int | None = None,
) -> Iterator[Block]:
    """Yield blocks of about ``block_bytes``, or of one larger document.

    With the rule ``file`` a block is always the whole file. end_id: id that ends each document in a
    file of ids.
    Raises DataError for a broken array, gzip stream or table, and a document above
    ``document_bytes``. Raises MissingKeyError for an item without its key.
    """
    line, offset = 1, 0
    try:
        for data, read in _pieces(corpus, rule, keys, block_bytes, document_bytes, end_id):
            yield Block(
                path=corpus.path,
                format=corpus.format,
                rule=rule,
                data=data,
                first_line=line,
                offset=offset,
                read_bytes=read,
            )
            if isinstance(data, bytes):
                line += data.count(b"\n")
                offset += len(data)
    except _LargeDocument:
        remedy = ", say with --documents what separates its documents" if corpus.format is CorpusFormat.TEXT else ""
        raise DataError(
            f"{corpus.path}: the document that begins in line {line} has more than"
            f" {document_bytes / 2**20:g} MiB, but must fit in memory whole; divide it{remedy},"
            " or allow more: --max-document-mib N"
        ) from None


def _pieces(
    corpus: Corpus, rule: DocumentRule, keys: tuple[str, ...], block_bytes: int, document_bytes: int, end_id: int | None
) -> Iterator[tuple[bytes | Texts, int]]:
    """Yield what blocks hold, and the bytes that were taken from disk for it."""
    if corpus.format in TABLES:
        yield from read_table(corpus.path, corpus.size, keys, block_bytes=block_bytes, document_bytes=document_bytes)
        return
    last_border: Callable[[bytes], int] = _after_line
    if corpus.format is CorpusFormat.TEXT:
        last_border = _LAST_BORDER[rule]
    elif corpus.format is CorpusFormat.IDS:
        last_border = partial(_after_mark, f" {end_id} ".encode())
    read = 0
    with corpus.open() as (file, raw):
        for data in (
            _array_blocks(file, corpus.path, keys, block_bytes, document_bytes)
            if corpus.format is CorpusFormat.ARRAY
            else _byte_blocks(file, last_border, block_bytes, document_bytes)
        ):
            yield data, raw.tell() - read
            read = raw.tell()


def texts_of(item: Any, keys: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the text under each key of a parsed item.

    An item that is a string itself stands for the key ``text``.
    Raises DataError naming the place, ``where``, and the keys of the item.
    """
    if isinstance(item, str):
        if keys == ("text",):
            check_words(item, where)
            return (item,)
        raise DataError(
            f"{where}: the item is a string and has no keys, but --json-keys asks for"
            f" {', '.join(keys)}; leave --json-keys out"
        )
    if not isinstance(item, dict):
        raise DataError(
            f'{where}: the item is {_kind(item)}, expected an object like {{"{keys[0]}": "..."}}; fix or remove it'
        )
    texts = []
    for key in keys:
        if key not in item:
            present = ", ".join(repr(name) for name in list(item)[:10]) or "none"
            raise MissingKeyError(f"{where}: the key {key!r} is missing, the keys present are {present}")
        if not isinstance(item[key], str):
            raise DataError(
                f"{where}: the value of {key!r} is {_kind(item[key])}, expected a string; fix or remove this item"
            )
        check_words(item[key], where)
        texts.append(item[key])
    return tuple(texts)


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", list: "an array", dict: "an object", str: "a string"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _array_blocks(
    file: BinaryIO, path: Path, keys: tuple[str, ...], block_bytes: int, document_bytes: int
) -> Iterator[Texts]:
    items: Texts = []
    size = 0
    for number, item in array_items(file, path, document_bytes):
        texts = texts_of(item, keys, f"{path}: item {number}")
        items.append(texts)
        size += sum(map(len, texts))
        if size >= block_bytes:
            yield items
            items, size = [], 0
    if items:
        yield items


def _byte_blocks(
    file: BinaryIO, last_border: Callable[[bytes], int], block_bytes: int, document_bytes: int
) -> Iterator[bytes]:
    rest = b""
    # doubling the chunk keeps the time for one huge document linear
    while chunk := file.read(max(block_bytes, min(len(rest), document_bytes + 1 - len(rest)))):
        buffer = rest + chunk if rest else chunk
        border = last_border(buffer)
        if border:
            yield buffer[:border]
        rest = buffer[border:]
        if len(rest) > document_bytes:
            raise _LargeDocument
    if rest:
        yield rest


def _after_line(buffer: bytes) -> int:
    return buffer.rfind(b"\n") + 1


def _after_blank_line(buffer: bytes) -> int:
    unix = buffer.rfind(b"\n\n")
    # a search for one byte is ten times as fast
    windows = buffer.rfind(b"\n\r\n") if b"\r" in buffer else -1
    if unix >= 0 or windows >= 0:
        return max(unix + 2, windows + 3)
    border = 0  # blank lines made of spaces: rare, so the slow search comes last
    for match in BLANK_LINES.finditer(buffer):
        border = match.end()
    return border


def _after_mark(mark: bytes, buffer: bytes) -> int:
    at = buffer.rfind(mark)
    return at + len(mark) if at >= 0 else 0


def _never(buffer: bytes) -> int:
    return 0


_LAST_BORDER: dict[DocumentRule, Callable[[bytes], int]] = {
    DocumentRule.BLANK_LINE: _after_blank_line,
    DocumentRule.LINE: _after_line,
    DocumentRule.FILE: _never,
    DocumentRule.EOT: partial(_after_mark, END_OF_TEXT.encode()),
}

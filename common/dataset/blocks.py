"""Cut a corpus into blocks of a few MB at document borders.

A block can be parsed and tokenized with no knowledge of the others.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from common.dataset.corpus import TABLES, Corpus, CorpusFormat
from common.dataset.encodings import DOCUMENT_BYTES, advice
from common.dataset.tables import Texts, read_table
from common.errors import DataError
from common.structured_files import MalformedError, kind_of, parse_json_item

BLOCK_BYTES = 4 << 20
END_OF_TEXT = "<|endoftext|>"
BLANK_LINES = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")


KEY_ADVICE = "; rename it, or name it with --json-keys"
"""End of the error for an item without a key, which concerns preprocessing."""
DocumentRule = Literal["blank_line", "line", "file", "eot"]
"""Border between the documents of a plain text."""


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
    ``document_bytes``, and for an item without its key.
    """
    block = partial(Block, path=corpus.path, format=corpus.format, rule=rule)
    if corpus.format in TABLES:
        sizes = {"block_bytes": block_bytes, "document_bytes": document_bytes}
        for texts, read in read_table(corpus.path, corpus.size, keys, **sizes):
            yield block(data=texts, first_line=1, offset=0, read_bytes=read)
        return
    last_border: Callable[[bytes], int] = _after_line
    if corpus.format == "text":
        last_border = _LAST_BORDER[rule]
    elif corpus.format == "ids":
        last_border = partial(_after_mark, f" {end_id} ".encode())
    read = 0
    with corpus.open() as (file, raw):
        for data, line, offset in (
            _array_blocks(file, corpus.path, keys, block_bytes, document_bytes)
            if corpus.format == "array"
            else _byte_blocks(file, corpus, last_border, block_bytes, document_bytes)
        ):
            yield block(data=data, first_line=line, offset=offset, read_bytes=raw.tell() - read)
            read = raw.tell()


def texts_of(item: Any, keys: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the text under each key of a parsed item.

    An item that is a string itself stands for the key ``text``.
    Raises DataError naming the place, ``where``, and the keys of the item.
    """
    if isinstance(item, str):
        if keys == ("text",):
            return (item,)
        raise DataError(
            f"{where}: the item is a string and has no keys, but --json-keys asks for"
            f" {', '.join(keys)}; leave --json-keys out"
        )
    if not isinstance(item, dict):
        raise DataError(
            f'{where}: the item is {kind_of(item)}, expected an object like {{"{keys[0]}": "..."}}; fix or remove it'
        )
    texts = []
    for key in keys:
        if key not in item:
            present = ", ".join(repr(name) for name in list(item)[:10]) or "none"
            raise DataError(f"{where}: the key {key!r} is missing, the keys present are {present}{KEY_ADVICE}")
        if not isinstance(item[key], str):
            raise DataError(
                f"{where}: the value of {key!r} is {kind_of(item[key])}, expected a string; fix or remove this item"
            )
        texts.append(item[key])
    return tuple(texts)


def _array_blocks(
    file: BinaryIO, path: Path, keys: tuple[str, ...], block_bytes: int, document_bytes: int
) -> Iterator[tuple[Texts, int, int]]:
    items: Texts = []
    size = 0
    for number, item in array_items(file, path, document_bytes):
        texts = texts_of(item, keys, f"{path}: item {number}")
        items.append(texts)
        size += sum(map(len, texts))
        if size >= block_bytes:
            yield items, 1, 0
            items, size = [], 0
    if items:
        yield items, 1, 0


def _byte_blocks(
    file: BinaryIO, corpus: Corpus, last_border: Callable[[bytes], int], block_bytes: int, document_bytes: int
) -> Iterator[tuple[bytes, int, int]]:
    """Yield bytes, their first line and their offset."""
    rest, line, offset = b"", 1, 0
    # doubling the chunk keeps the time for one huge document linear
    while chunk := file.read(max(block_bytes, min(len(rest), document_bytes + 1 - len(rest)))):
        buffer = rest + chunk if rest else chunk
        border = last_border(buffer)
        if border:
            yield buffer[:border], line, offset
            line, offset = line + buffer.count(b"\n", 0, border), offset + border
        rest = buffer[border:]
        if len(rest) > document_bytes:
            remedy = ", say with --documents what separates its documents" if corpus.format == "text" else ""
            raise DataError(
                f"{corpus.path}: the document that begins in line {line} has more than"
                f" {document_bytes / 2**20:g} MiB, but must fit in memory whole; divide it{remedy},"
                " or allow more: --max-document-mib N"
            )
    if rest:
        yield rest, line, offset


def _after_line(buffer: bytes) -> int:
    return buffer.rfind(b"\n") + 1


def _after_blank_line(buffer: bytes) -> int:
    unix = buffer.rfind(b"\n\n")
    # a search for one byte is ten times as fast
    windows = buffer.rfind(b"\n\r\n") if b"\r" in buffer else -1
    if unix >= 0 or windows >= 0:
        return max(unix + 2, windows + 3)
    # blank lines made of spaces: rare, so the slow search comes last
    return max((match.end() for match in BLANK_LINES.finditer(buffer)), default=0)


def _after_mark(mark: bytes, buffer: bytes) -> int:
    at = buffer.rfind(mark)
    return at + len(mark) if at >= 0 else 0


_LAST_BORDER: dict[DocumentRule, Callable[[bytes], int]] = {
    "blank_line": _after_blank_line,
    "line": _after_line,
    "file": lambda buffer: 0,
    "eot": partial(_after_mark, END_OF_TEXT.encode()),
}


# ---- a JSON array ----


_READ_BYTES = 1 << 20
_NEAR = 16
"""Characters at the end of what was read in which a number, a word or an escape may be cut."""
_NO_SPACE = re.compile(r"[^ \t\n\r]")
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*(?=[^ \t\n\r])")
"""What is between two items, with the next one's first character behind it."""


class _Text:
    """Text of a file from ``at`` on, as far as it is ``held``, behind ``number`` items."""

    def __init__(self, file: BinaryIO, path: Path, item_bytes: int) -> None:
        self._file, self._path, self._item_bytes = file, path, item_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.held, self.at, self.number, self._read, self._is_whole = "", 0, 0, 0, False

    def sign(self) -> str:
        """Go to the next character that is not white space, and return it; empty at the end."""
        while not (found := _NO_SPACE.search(self.held, self.at)):
            self.at = len(self.held)
            if not self._more():
                return ""
        self.at = found.start()
        return found[0]

    def item(self) -> Any:
        while True:
            try:
                found, end = parse_json_item(self.held, self.at)
            except MalformedError as error:
                is_cut = error.problem.startswith("Unterminated")
                if error.line and not is_cut:
                    before = "\n".join(self.held.split("\n")[: error.line - 1])
                    is_cut = len(before) + error.column > len(self.held) - _NEAR
                if is_cut and self._more():
                    continue
                problem = error.problem.removesuffix(" at").removesuffix(" starting")
                raise self.wrong(problem) from None
            # the number 12 may be the begin of 12e3
            if end > len(self.held) - _NEAR and self._more():
                continue
            self.at, self.number = end, self.number + 1
            return found

    def wrong(self, problem: str) -> DataError:
        return DataError(
            f"{self._path}: not valid JSON after {self.number} items: {problem}; fix it, or copy"
            " the file again if it was cut short"
        )

    def _more(self) -> bool:
        """Read as much again as is left, and return whether the file had not ended."""
        rest, most = self.held[self.at :], self._item_bytes
        if self._is_whole:
            return False
        if 4 * len(rest) > most and len(rest.encode()) > most:
            raise DataError(
                f"{self._path}: item {self.number + 1} has more than {most / 2**20:g} MiB, but must"
                " fit in memory whole; divide it, or allow more: --max-document-mib N"
            )
        data = self._file.read(max(_READ_BYTES, min(len(rest), most - len(rest))))
        self._is_whole, self._read = not data, self._read + len(data)
        try:
            self.held, self.at = rest + self._decode(data, self._is_whole), 0
        except UnicodeDecodeError as error:
            place = self._read - len(error.object) + error.start
            raise DataError(f"{self._path}: byte {place} is not UTF-8 ({error.reason}); {advice(data)}") from None
        return True


def array_items(file: BinaryIO, path: Path, item_bytes: int = DOCUMENT_BYTES) -> Iterator[tuple[int, Any]]:
    """Yield the items of the one array in a file, and their numbers from 1.

    Memory: the longest item. Raises DataError with the number of the item if the text is not UTF-8,
    not an array, not valid JSON or ends early, and for an item of more than ``item_bytes``.
    """
    text = _Text(file, path, item_bytes)
    if text.sign() != "[":
        raise DataError(f"{path}: expected a JSON array, which begins with '['")
    text.at += 1
    is_empty = text.sign() == "]"
    text.at += is_empty
    while not is_empty:
        item = text.item()
        yield text.number, item
        if found := _COMMA.match(text.held, text.at):
            text.at = found.end()
            continue
        sign = text.sign()
        text.at += 1
        if sign == "]":
            break
        if sign != ",":
            raise text.wrong("expected ',' or ']'")
        text.sign()
    if text.sign():
        raise text.wrong("the array has ended, and more text follows")

"""Items of a JSON array, read by ijson in bounded memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ijson

from common.dataset.encodings import advice
from common.dataset.limits import DOCUMENT_BYTES
from common.errors import DataError

_READ_BYTES = 1 << 16
_END = object()
_MAX_OPEN = 12000
"""Brackets of a block that stay open: memory of ijson grows with the square of the depth."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\Z)', re.DOTALL)
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Escapes of JSON; the group is half of a pair."""
_BEGUN = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3}"
    rb"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?)\Z"
)
"""An escape, or a pair, whose end is not read yet."""


def _with_whole_pairs(text: bytes) -> bytes:
    """Return JSON with U+FFFD for half of a surrogate pair, of which yajl would make other text."""
    if b"\\ud" not in text and b"\\uD" not in text:
        return text
    return _ESCAPES.sub(lambda found: b"\\ufffd" if found[1] else found[0], text)


def _still_open(text: bytes) -> int:
    return sum(map(text.count, (b"[", b"{"))) - sum(map(text.count, (b"]", b"}")))


class _Limited:
    """File that refuses to be read further than ``limit`` bytes beyond the last item."""

    def __init__(self, file: BinaryIO, path: Path, limit: int) -> None:
        self._file, self._path, self._limit = file, path, limit
        self.items, self._since, self._in_string = 0, 0, False
        self.last = self._file.read(_READ_BYTES)
        self._next = self.last.removeprefix(b"\xef\xbb\xbf")
        if self._next.lstrip()[:1] != b"[":
            raise DataError(f"{path}: expected a JSON array, which begins with '['")

    def read(self, size: int) -> bytes:
        if not size:  # ijson asks for the type
            return b""
        if self._since > self._limit:
            raise DataError(
                f"{self._path}: item {self.items + 1} has more than {self._limit / 2**20:g} MiB,"
                " but must fit in memory whole; divide it, or allow more: --max-document-mib N"
            )
        found = b""
        while not found:
            more = self._file.read(size)
            both, self._next = self._next + more, b""
            tail = both[-64:] if both[-64:-63] != b"\\" else both
            if more and (begun := _BEGUN.search(tail)):
                both, self._next = both[: -len(begun[1])], both[-len(begun[1]) :]
            found = _with_whole_pairs(both)
            if not more:
                break
        bare = found.replace(rb"\\", b"")
        if _still_open(bare) > _MAX_OPEN:
            outside = _STRING.sub(b"", b'"' + bare if self._in_string else bare)
            if _still_open(outside) > _MAX_OPEN:
                raise DataError(
                    f"{self._path}: item {self.items + 1} is nested too deeply; fix or remove it"
                )
        self._in_string ^= (bare.count(b'"') - bare.count(rb"\"")) % 2 == 1
        self._since += len(found)
        self.last = found or self.last
        return found

    def count(self) -> None:
        self.items, self._since = self.items + 1, 0


def array_items(
    file: BinaryIO, path: Path, item_bytes: int = DOCUMENT_BYTES
) -> Iterator[tuple[int, Any]]:
    """Yield the items of the one array in a file, and their numbers from 1.

    Memory: the longest item. Raises DataError with the number of the item if the text is not UTF-8,
    not an array, not valid JSON or ends early, and for an item of more than ``item_bytes``.
    """
    limited = _Limited(file, path, item_bytes)
    try:
        items = ijson.items(limited, "item", buf_size=_READ_BYTES)
        while (item := _next(items)) is not _END:
            limited.count()
            yield limited.items, item
    except (ijson.JSONError, ValueError) as error:
        reason = str(error).removeprefix("b'").partition("\n")[0].partition("\\n")[0]
        remedy = (
            advice(limited.last)
            if "UTF8" in reason or isinstance(error, UnicodeDecodeError)
            else "fix it, or copy the file again if it was cut short"
        )
        raise DataError(
            f"{path}: not valid JSON after {limited.items} items: {reason}; {remedy}"
        ) from None


def _next(items: Iterator[Any]) -> Any:
    """Return the next item with any number of digits: ijson 3.6 crashes where Python refuses."""
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return next(items, _END)
    finally:
        sys.set_int_max_str_digits(digits)

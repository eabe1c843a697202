"""Items of a JSON array, parsed one after the other as it is read."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.dataset.encodings import advice
from common.dataset.limits import DOCUMENT_BYTES
from common.errors import DataError
from common.structured_files import MalformedError, parse_json_item

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
                if self._is_cut(error) and self._more():
                    continue
                problem = error.problem.removesuffix(" at").removesuffix(" starting")
                raise self.wrong(problem) from None
            # the number 12 may be the begin of 12e3
            if end > len(self.held) - _NEAR and self._more():
                continue
            self.at, self.number = end, self.number + 1
            return found

    def _is_cut(self, error: MalformedError) -> bool:
        """Return whether the end of what was read may be at fault."""
        place = 0
        for _ in range(error.line - 1):
            place = self.held.index("\n", place) + 1
        near = bool(error.line) and place + error.column > len(self.held) - _NEAR
        return near or error.problem.startswith("Unterminated")

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

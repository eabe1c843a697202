"""Read a JSON array item by item in bounded memory, unlike the standard library."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.dataset.encodings import advice
from common.dataset.limits import DOCUMENT_BYTES
from common.errors import DataError
from common.structured_files import MalformedError, parse_json_item

_CHUNK_BYTES = 1 << 20
_SPACE = " \t\r\n"
# The longest escape that a chunk's end can cut in two is \ud83d\ude00.
_LONGEST_CUT = 12


class JsonArrayReader:
    """Iterator over the items of one array.

    line, column: start of the last item, from 1.
    Memory: one chunk of 1 MiB, or the longest item. Raises DataError with line and column if the
    text is not UTF-8, is not an array, is not valid JSON or ends early. An item of more than
    ``item_characters`` is an error too.
    """

    def __init__(self, file: BinaryIO, path: Path, item_characters: int = DOCUMENT_BYTES) -> None:
        self._file = file
        self._limit = item_characters
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._buffer = ""
        self._at = 0
        self._bytes_read = 0
        self._ended = False
        self._counted = 0  # place in the buffer of line and column
        self.line = 1
        self.column = 1

    def __iter__(self) -> Iterator[Any]:
        if self._next_character() != "[":
            raise self._error(self._at, f"found {self._peek()}, expected '[' (a JSON array)")
        self._at += 1
        if self._next_character() != "]":
            while True:
                yield self._item()
                mark = self._next_character()
                if mark == "]":
                    break
                if mark != ",":
                    raise self._error(
                        self._at, f"found {self._peek()}, expected ',' or ']' after an item"
                    )
                self._at += 1
        self._at += 1
        if self._next_character():
            raise self._error(
                self._at,
                f"found {self._peek()} after the array's end, expected nothing; one file holds one"
                " array",
            )

    def _item(self) -> Any:
        if not self._next_character():
            raise self._error(
                self._at, "the file ends inside the array, expected an item; it may be cut short"
            )
        while True:
            try:
                value, end = parse_json_item(self._buffer, self._at)
            except MalformedError as error:
                # The place within the item is unknown for a number of too many digits and for too
                # deep nesting.
                if not error.line:
                    raise self._error(
                        self._at, f"this item cannot be read: {error.problem}; fix or remove it"
                    ) from None
                # A string or a value that the end of the chunk has cut is not an error yet.
                cut = (
                    error.problem.startswith("Unterminated string")
                    or error.position >= len(self._buffer) - _LONGEST_CUT
                )
                if cut and not self._ended:
                    self._more()
                    continue
                ends = self._ended and (
                    error.position >= len(self._buffer)
                    or error.problem.startswith("Unterminated string")
                )
                advice = (
                    "the file ends inside this item, it may be cut short"
                    if ends
                    else "this is not valid JSON, fix it"
                )
                raise self._error(error.position, f"{error.problem}; {advice}") from None
            self._locate(self._at)
            self._at = end
            return value

    def _next_character(self) -> str:
        """Return the next character that is not white space, or "" at the end of the file.

        Afterwards ``_at`` points to it.
        """
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in _SPACE:
                    return self._buffer[self._at]
                self._at += 1
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Drop what has been read and append a chunk, larger when an item is long.

        Returns False at the end of the file.
        """
        if self._ended:
            return False
        self._locate(self._at)
        rest = self._buffer[self._at :]
        if len(rest) > self._limit:
            size = f"{self._limit / 2**20:g} Mi characters"
            problem = (
                f"the item has more than {size}, but must fit in memory whole; divide it, or"
                " allow more: --max-document-mib N"
            )
            raise self._error(self._at, problem)
        data = self._file.read(max(_CHUNK_BYTES, len(rest)))
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            self._buffer = rest
            self._at = self._counted = 0
            # ends where the bad byte is
            before = error.object[: error.start].decode("utf-8", "ignore")
            self._buffer += before
            raise self._error(
                len(self._buffer),
                f"byte {self._bytes_read + len(data) - len(error.object) + error.start} is not"
                f" UTF-8 ({error.reason}); {advice(data)}",
            ) from None
        if self._bytes_read == 0:
            text = text.removeprefix("\ufeff")
        self._bytes_read += len(data)
        self._ended = not data
        self._buffer = rest + text
        self._at = self._counted = 0
        return not self._ended

    def _locate(self, at: int) -> None:
        """Move ``line`` and ``column`` to ``at``."""
        newlines = self._buffer.count("\n", self._counted, at)
        if newlines:
            self.line += newlines
            self.column = at - self._buffer.rfind("\n", self._counted, at)
        else:
            self.column += at - self._counted
        self._counted = at

    def _peek(self) -> str:
        return (
            repr(self._buffer[self._at]) if self._at < len(self._buffer) else "the end of the file"
        )

    def _error(self, at: int, problem: str) -> DataError:
        self._locate(max(at, self._counted))
        return DataError(f"{self._path}: line {self.line}, column {self.column}: {problem}")

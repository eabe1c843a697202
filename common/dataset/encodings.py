"""Corpora in encodings other than UTF-8, and the sizes beyond which a corpus is refused.

The sizes bound the memory of a tokenizer for every input.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from common.errors import ConfigError, DataError

_HEAD = 1 << 16
_GBK = "gb18030"
"""Codec that includes GBK, which includes GB2312."""


def checked_encoding(name: str) -> str:
    """Return the codec of an encoding. Raises ConfigError if Python has no text codec for it."""
    known = {"gbk": _GBK, "gb2312": _GBK, "cp936": _GBK}
    try:
        codec = codecs.lookup(name)
        "".encode(codec.name)  # decoding nothing finds no codec that is of bytes
    except (LookupError, ValueError):
        raise ConfigError(
            f"--encoding {name!r}: not an encoding of text; for example utf-8, gbk, big5 or utf-16"
        ) from None
    return known.get(codec.name, codec.name)


def advice(data: bytes) -> str:
    """Return how to read bytes that are not text in UTF-8."""
    if order := utf16_order(data):
        return (
            f"the file looks like UTF-16 without its mark: add --encoding {order}, or convert it:"
            f" iconv -f {order.upper()} -t UTF-8"
        )
    beyond = [char for char in _decoded(data[:_HEAD], _GBK) if char > "\x7f"]
    if 2 * sum("\u4e00" <= char <= "\u9fff" or "\u3000" <= char <= "\u303f" for char in beyond) > len(beyond):
        return "the file looks like GBK: add --encoding gbk, or convert it, for example: iconv -f GB18030 -t UTF-8"
    return "give its --encoding, or convert the file, for example: iconv -f GB18030 -t UTF-8"


def utf16_order(data: bytes) -> str | None:
    """Return the codec of text in UTF-16 without a mark, None for other bytes. The end may be cut.

    Such text has line ends, spaces or Chinese marks, and no U+0000. UTF-8 with a few NUL bytes can
    pass for it; UTF-16 that is valid UTF-8 too is ASCII, and half of its bytes are NUL.
    """
    data = data[:_HEAD]
    if _decoded(data, "utf-8") and 4 * data.count(0) < len(data):
        return None
    found: dict[str, int] = {}
    for order in ("utf-16-le", "utf-16-be"):
        text = _decoded(data, order)
        found[order] = 0 if "\0" in text else sum(map(text.count, "\n ，。"))
    best = max(found, key=found.__getitem__)
    return best if found[best] else None


def require_no_nul(data: bytes, where: str) -> None:
    """Raise DataError for a NUL byte in the bytes of a text. where: the place of ``data``."""
    if b"\0" not in data:
        return
    remedy = (
        advice(data)
        if utf16_order(data)
        else "the file is binary, or was not written whole: copy it again, or remove them: tr -d '\\000'"
    )
    raise DataError(f"{where} holds NUL bytes (0x00), {data.count(0)} of {len(data)}; {remedy}")


def _decoded(data: bytes, codec: str) -> str:
    """Return the text of bytes whose end may be cut, empty unless they are of this encoding."""
    try:
        return codecs.getincrementaldecoder(codec)().decode(data)
    except UnicodeDecodeError:
        return ""


class Recoded:
    """Reader of a file in another encoding as UTF-8. Raises DataError with the wrong byte."""

    def __init__(self, file: BinaryIO, path: Path, encoding: str) -> None:
        self._file = file
        self._path = path
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._read = 0

    def read(self, size: int = -1) -> bytes:
        """Return about ``size`` bytes, and none only at the end."""
        while True:
            data = self._file.read(size)
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                place = self._read + len(data) - len(error.object) + error.start
                raise DataError(
                    f"{self._path}: byte {place} is not {self._encoding}"
                    f" (0x{error.object[error.start]:02x}, {error.reason}); check --encoding"
                ) from None
            self._read += len(data)
            if text or not data:
                return text.encode()


DOCUMENT_BYTES = 256 << 20
"""Maximum bytes of a document. Tokenizing takes about six times as much memory."""
WORD_CHARACTERS = 4 << 20
"""Maximum characters of a word.

GPT-2 takes a run of letters, digits, signs or white space as one word. It needs about 30 bytes of memory a byte.
"""
_FIRST = 64

_KINDS: dict[str, Callable[[str], object]] = {
    "letters without a space or a digit": str.isalpha,
    "digits": str.isnumeric,
    "white space": str.isspace,
    "signs without a letter, a digit or a space": re.compile(r"(?:[^\w\s]|_)+").fullmatch,
}


def check_words(text: str, where: str | Callable[[str], str], limit: int = WORD_CHARACTERS) -> None:
    """Raise DataError for a word of twice ``limit`` characters or more. A word below ``limit`` always passes.

    where: place of the text in its file, or a function that returns the place of the word.
    The time does not depend on the words. A word that long covers two multiples of ``limit`` and
    all characters between them.
    """
    for first in range(0, len(text) - limit + 1, limit):
        head = text[first : first + min(_FIRST, limit)]
        for kind, holds in _KINDS.items():
            if holds(head) and holds(text[first : first + limit]):
                while first and holds(text[first - 1]):
                    first -= 1
                place = where if isinstance(where, str) else where(text[first : first + limit])
                raise DataError(
                    f"{place}: holds a word of {limit} or more characters, beginning with"
                    f" {text[first : first + 20]!r}: {kind}; tokenizing it would take memory"
                    " without end; divide it or remove it"
                )

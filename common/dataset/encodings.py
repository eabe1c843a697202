"""Corpora in encodings other than UTF-8."""

from __future__ import annotations

import codecs
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
        b"".decode(codec.name)
    except (LookupError, ValueError):
        raise ConfigError(
            f"--encoding {name!r}: not an encoding of text; for example utf-8, gbk, big5 or utf-16"
        ) from None
    return known.get(codec.name, codec.name)


def advice(data: bytes) -> str:
    """Return how to read bytes that are not UTF-8."""
    if is_gbk(data):
        return (
            "the file looks like GBK: add --encoding gbk, or convert it, for example: iconv -f"
            " GB18030 -t UTF-8"
        )
    return "give its --encoding, or convert the file, for example: iconv -f GB18030 -t UTF-8"


def is_gbk(data: bytes) -> bool:
    """Return whether bytes that are not UTF-8 are Chinese in GBK. The end may be cut."""
    try:
        text = codecs.getincrementaldecoder(_GBK)().decode(data[:_HEAD])
    except UnicodeDecodeError:
        return False
    beyond = [char for char in text if char > "\x7f"]
    chinese = sum("\u4e00" <= char <= "\u9fff" or "\u3000" <= char <= "\u303f" for char in beyond)
    return 2 * chinese > len(beyond)


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

    def tell(self) -> int:
        return self._file.tell()

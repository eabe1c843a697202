"""Corpora in encodings other than UTF-8, and the size beyond which a document is refused."""

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
        "".encode(codec.name)  # decoding nothing finds no codec that is of bytes
    except (LookupError, ValueError):
        raise ConfigError(
            f"--encoding {name!r}: not an encoding of text; for example utf-8, gbk, big5 or utf-16"
        ) from None
    return known.get(codec.name, codec.name)


def advice(data: bytes) -> str:
    """Return how to read bytes that are not text in UTF-8."""
    try:  # the end may be cut
        text = codecs.getincrementaldecoder(_GBK)().decode(data[:_HEAD])
    except UnicodeDecodeError:
        text = ""
    beyond = [char for char in text if char > "\x7f"]
    if 2 * sum("\u4e00" <= char <= "\u9fff" or "\u3000" <= char <= "\u303f" for char in beyond) > len(beyond):
        return "it looks like GBK: convert it (iconv -f GB18030 -t UTF-8), or use a tool that takes --encoding gbk"
    return "convert it, for example: iconv -f GB18030 -t UTF-8, or use a tool that takes its --encoding"


def require_no_nul(data: bytes, where: str) -> None:
    """Raise DataError for a NUL byte in the bytes of a text. where: the place of ``data``."""
    if b"\0" not in data:
        return
    raise DataError(
        f"{where} holds NUL bytes (0x00), {data.count(0)} of {len(data)}; if it is UTF-16, convert it to UTF-8 (iconv)"
        " or use a tool that takes --encoding utf-16-le or utf-16-be, by the order of its bytes; else copy it again,"
        " since it was not written whole, or remove them: tr -d '\\000'"
    )


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

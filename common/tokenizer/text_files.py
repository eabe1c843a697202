"""Text of the files of a vocabulary."""

from __future__ import annotations

from pathlib import Path

from common.errors import TokenizerError
from common.structured_files import MAX_JSON_BYTES, read_bytes


def read_vocabulary_text(path: Path, what: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    what: its content, for messages. Raises TokenizerError.
    """
    try:
        raw = read_bytes(path, limit=MAX_JSON_BYTES, error=TokenizerError)
    except TokenizerError as error:
        raise TokenizerError(f"{error}; expected the {what}") from None
    if not raw.strip():
        raise TokenizerError(
            f"{path}: is empty ({len(raw)} bytes); expected the {what}; fetch the file again"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise TokenizerError(
            f"{path}: line {line}, byte {column} of the line: 0x{raw[error.start]:02x} is not UTF-8"
            f" ({error.reason}); expected the {what} as UTF-8 text;"
            f" {how_to_convert(raw) or 'fetch the file again'}"
        ) from None


def how_to_convert(raw: bytes) -> str:
    """Return advice for text in GBK, which GB18030 includes; empty for other text."""
    try:
        raw.decode("gb18030")
    except UnicodeDecodeError:
        return ""
    return "it may be GBK, convert it: iconv -f GB18030 -t UTF-8"

"""Turn a block into the documents it holds, as UTF-8 bytes or as strings, whichever is there without a copy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from common.dataset.blocks import BLANK_LINES, END_OF_TEXT, Block, DocumentRule, texts_of
from common.dataset.corpus import Format
from common.errors import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACES_ONLY = re.compile(rb"\n[ \t\r\f\v]+\n")


@dataclass(frozen=True, kw_only=True)
class Documents:
    """texts: those that hold more than white space, in order. empty: how many did not. size: bytes of text, about."""

    texts: Sequence[bytes] | Sequence[str]
    empty: int
    size: int


def documents_of(block: Block, keys: tuple[str, ...]) -> list[Documents]:
    """One entry per key. Raises DataError with the line and column of what is wrong.

    The bytes of a text are passed on unchecked: the tokenizer decodes them anyway, and ``check_utf8`` finds the place afterwards.
    """
    if isinstance(block.data, list):
        return [_from_strings([texts[n] for texts in block.data]) for n in range(len(keys))]
    data = block.data
    if block.format is not Format.TEXT:
        check_utf8(block)
    if block.offset == 0:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    if block.format is Format.TEXT:
        return [_from_text(data, block.rule)]
    items = _parse_lines(block, data, keys)
    return [_from_strings([texts[n] for texts in items]) for n in range(len(keys))]


def _from_text(data: bytes, rule: DocumentRule) -> Documents:
    size = len(data)
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    if rule is DocumentRule.FILE:
        pieces = [data]
    elif rule is DocumentRule.LINE:
        pieces = data.removesuffix(b"\n").split(b"\n")
    elif rule is DocumentRule.EOT:
        pieces = [piece.strip(b"\n") for piece in data.split(END_OF_TEXT.encode())]
        if not pieces[-1].strip():
            pieces.pop()  # what follows the last mark of a block is no document
    else:
        # Where no line is made of spaces alone, str.split does in one pass what the pattern would do in three.
        if _SPACES_ONLY.search(data):
            data = BLANK_LINES.sub(b"\n\n", data)
        pieces = [piece for part in data.split(b"\n\n") if (piece := part.strip(b"\n"))]
    texts = [piece for piece in pieces if piece and not piece.isspace()]
    empty = 0 if rule is DocumentRule.BLANK_LINE else len(pieces) - len(texts)
    return Documents(texts=texts, empty=empty, size=size)


def _from_strings(texts: list[str]) -> Documents:
    kept = [text for text in texts if text and not text.isspace()]
    try:
        size = len("".join(kept).encode())
    except UnicodeEncodeError:
        # JSON may spell half a surrogate pair (\ud83d), which UTF-8 cannot: U+FFFD takes its place, as a decoder would do.
        kept = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in kept]
        size = len("".join(kept).encode())
    return Documents(texts=kept, empty=len(texts) - len(kept), size=size)


def _parse_lines(block: Block, data: bytes, keys: tuple[str, ...]) -> list[tuple[str, ...]]:
    items = []
    # Not splitlines: JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(data.decode().split("\n"), block.first_line):
        if not line or line.isspace():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{block.path}: line {number}, column {error.colno}: {error.msg}; expected one JSON object per line, mend or remove it"
            ) from None
        items.append(texts_of(item, keys, block.path, number))
    return items


def check_utf8(block: Block) -> None:
    """Raises DataError with line, column and byte when the block's bytes are not UTF-8."""
    data = block.data
    if isinstance(data, list):
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        line = block.first_line + data.count(b"\n", 0, error.start)
        column = len(data[line_start : error.start].decode()) + 1
        raise DataError(
            f"{block.path}: line {line}, column {column}: byte {block.offset + error.start} is not UTF-8 "
            f"(0x{data[error.start]:02x}, {error.reason}); convert the file, for example: iconv -f GB18030 -t UTF-8"
        ) from None

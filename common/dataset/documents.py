"""Documents of blocks, and the texts of whole corpora for vocabularies and their training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.dataset.blocks import BLANK_LINES, END_OF_TEXT, Block, DocumentRule, read_blocks, texts_of
from common.dataset.corpus import open_corpus
from common.dataset.encodings import advice, require_no_nul
from common.errors import DataError
from common.structured_files import MalformedError, parse_json

_BLANK_LINES = re.compile(BLANK_LINES.pattern.decode())
_SPACES_ONLY = re.compile(rb"\n[ \t\r\f\v]+\n")


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents of a block under one key.

    texts: their texts in order. Of plain text, those with more than white space; of other formats
    all, as in Megatron's preprocess_data.py. places: their numbers among all pieces of the block.
    blank: number of the pieces of plain text that were left out. size: bytes of text.
    """

    texts: list[str]
    places: list[int]
    blank: int
    size: int

    def written(self) -> list[str]:
        """Return the texts with more than white space."""
        return [text for text in self.texts if text and not text.isspace()]


def documents_of(block: Block, keys: tuple[str, ...]) -> list[Documents]:
    """Return one entry per key. Raises DataError with the line and column of an error."""
    if isinstance(block.data, list):
        items = block.data
    else:
        data, text = block.data, _decode(block, block.data)
        if block.offset == 0:
            text = text.removeprefix("\ufeff")
        if block.format == "text":
            return [_from_text(text, data, block.rule)]
        items = _parse_lines(block, text, keys)
    found = []
    for n in range(len(keys)):
        texts = [each[n] for each in items]
        try:
            size = len("".join(texts).encode())
        except UnicodeEncodeError:
            # JSON may spell half a surrogate pair (\ud83d), which UTF-8 cannot: U+FFFD takes its place,
            # as a decoder would do.
            texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
            size = len("".join(texts).encode())
        found.append(Documents(texts=texts, places=list(range(len(texts))), blank=0, size=size))
    return found


def read_texts(
    files: Sequence[Path],
    *,
    encoding: str,
    keys: tuple[str, ...] = ("text",),
    rule: DocumentRule = "blank_line",
    on_bytes: Callable[[int], object] = lambda read: None,
) -> Iterator[str]:
    """Yield the documents of each file in turn, read in blocks of a few MB; none of white space.

    on_bytes: called with the number of bytes that each block took from disk.
    Raises DataError with the line and column of an error, and if there is no text at all.
    """
    found = False
    for path in files:
        corpus = open_corpus(path, encoding=encoding)
        names = ("text",) if corpus.format == "text" else keys
        for block in read_blocks(corpus, rule, names):
            for documents in documents_of(block, names):
                texts = documents.written()
                found = found or bool(texts)
                yield from texts
            on_bytes(block.read_bytes)
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: no text; give a corpus")


def _from_text(text: str, data: bytes, rule: DocumentRule) -> Documents:
    """Split a text into documents. data: the bytes of ``text``, which can be searched several times as fast."""
    if b"\r" in data:
        text = text.replace("\r\n", "\n")
    if rule == "file":
        pieces = [text]
    elif rule == "line":
        pieces = text.removesuffix("\n").split("\n")
    elif rule == "eot":
        pieces = [piece.strip("\n") for piece in text.split(END_OF_TEXT)]
        if not pieces[-1].strip():
            pieces.pop()  # the text after the last mark of a block is not a document
    else:
        # Such a line is rare. Without one, a split on two newlines is several times as fast.
        if _SPACES_ONLY.search(data):
            text = _BLANK_LINES.sub("\n\n", text)
        pieces = [part.strip("\n") for part in text.split("\n\n")]
    if rule == "blank_line":  # two borders with nothing between them make no document
        pieces = [piece for piece in pieces if piece and not piece.isspace()]
    places = [place for place, piece in enumerate(pieces) if piece and not piece.isspace()]
    texts = [pieces[place] for place in places]
    return Documents(texts=texts, places=places, blank=len(pieces) - len(texts), size=len(data))


def _parse_lines(block: Block, text: str, keys: tuple[str, ...]) -> list[tuple[str, ...]]:
    items = []
    # Not splitlines: JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), block.first_line):
        if not line or line.isspace():
            continue
        try:
            item = parse_json(line, strict=False)
        except MalformedError as error:
            where = f"{block.path}: line {number}, column {error.column or 1}"
            if line.startswith("\ufeff"):
                raise DataError(
                    f"{where}: a byte order mark (U+FEFF) begins this line, as where files were"
                    " joined; remove the marks: sed 's/^\\xEF\\xBB\\xBF//'"
                ) from None
            raise DataError(f"{where}: {error.problem}; expected one JSON object per line, fix or remove it") from None
        items.append(texts_of(item, keys, f"{block.path}: line {number}, column 1"))
    return items


def _decode(block: Block, data: bytes) -> str:
    require_no_nul(data, f"{block.path}: the text from line {block.first_line}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        line = block.first_line + data.count(b"\n", 0, error.start)
        column = len(data[line_start : error.start].decode()) + 1
        raise DataError(
            f"{block.path}: line {line}, column {column}: byte {block.offset + error.start} is not"
            f" UTF-8 (0x{data[error.start]:02x}, {error.reason}); {advice(data)}"
        ) from None

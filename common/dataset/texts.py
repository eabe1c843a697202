"""Texts of corpora in sequence, for vocabularies and their training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.dataset.blocks import DocumentRule, read_blocks
from common.dataset.corpus import CorpusFormat, open_corpus
from common.dataset.documents import documents_of
from common.errors import DataError


def read_texts(
    files: Sequence[Path],
    *,
    encoding: str,
    keys: tuple[str, ...] = ("text",),
    rule: DocumentRule = DocumentRule.BLANK_LINE,
    on_bytes: Callable[[int], object] = lambda read: None,
) -> Iterator[str]:
    """Yield the documents of each file in turn, read in blocks of a few MB; none of white space.

    on_bytes: called with the number of bytes that each block took from disk.
    Raises DataError with the line and column of an error, and if there is no text at all.
    """
    found = False
    for path in files:
        corpus = open_corpus(path, encoding=encoding)
        names = ("text",) if corpus.format is CorpusFormat.TEXT else keys
        for block in read_blocks(corpus, rule, names):
            for documents in documents_of(block, names):
                texts = documents.written()
                found = found or bool(texts)
                yield from texts
            on_bytes(block.read_bytes)
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: no text; give a corpus")

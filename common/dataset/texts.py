"""The texts of corpora one after another, for what reads them whole: vocabularies and their
training.
"""

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
    """Documents of each file in turn, a block of a few MB at a time. on_bytes: called with the
    bytes that each block took from disk.

    Raises DataError with the line and column of what is wrong, and where there is no text at all.
    """
    found = False
    for path in files:
        corpus = open_corpus(path, encoding=encoding)
        names = ("text",) if corpus.format is CorpusFormat.TEXT else keys
        for block in read_blocks(corpus, rule, names):
            for documents in documents_of(block, names):
                found = found or bool(documents.texts)
                yield from documents.texts
            on_bytes(block.read_bytes)
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: no text; give a corpus")

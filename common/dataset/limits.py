"""Sizes beyond which a corpus is refused. They bound the memory of a tokenizer for every input."""

from __future__ import annotations

import re
from collections.abc import Callable

from common.errors import DataError

DOCUMENT_BYTES = 256 << 20
"""Maximum bytes of a document. Tokenizing takes about six times as much memory."""
WORD_CHARACTERS = 4 << 20
"""Maximum characters of a word.

GPT-2 takes a run of letters, digits, signs or white space as one word. It needs about 30 bytes of
memory a byte.
"""
_FIRST = 64

_KINDS: dict[str, Callable[[str], object]] = {
    "letters without a space or a digit": str.isalpha,
    "digits": str.isnumeric,
    "white space": str.isspace,
    "signs without a letter, a digit or a space": re.compile(r"(?:[^\w\s]|_)+").fullmatch,
}


def check_words(text: str, where: str | Callable[[str], str], limit: int = WORD_CHARACTERS) -> None:
    """Raise DataError for a word of twice ``limit`` characters or more. A word below ``limit``
    always passes.

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

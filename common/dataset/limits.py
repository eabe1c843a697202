"""The sizes beyond which a corpus is refused: what a tokenizer must hold at once is then bounded,
whatever the input.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from common.errors import DataError

DOCUMENT_BYTES = 256 << 20
"""Of the largest document; tokenizing takes about six times as much memory."""
WORD_CHARACTERS = 4 << 20
"""A run of letters, of digits, of signs or of white space is one word of GPT-2, and takes about 30
bytes of memory a byte.
"""
_FIRST = 64

_KINDS: dict[str, Callable[[str], object]] = {
    "letters without a space or a digit": str.isalpha,
    "digits": str.isnumeric,
    "white space": str.isspace,
    "signs without a letter, a digit or a space": re.compile(r"(?:[^\w\s]|_)+").fullmatch,
}


def check_words(text: str, where: str | Callable[[str], str], limit: int = WORD_CHARACTERS) -> None:
    """Raise DataError where a word has twice ``limit`` characters or more; one of less than
    ``limit`` always passes.

    where: the place of the text in its file, or what gives the place of the word. The time does not
    depend on what the words are: a word that long covers two multiples of ``limit``, and all
    between them.
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

"""Checks that every tokenizer of a foreign library shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from common.errors import TokenizerError
from common.tokenizer.base import TokenIds


def checked_ids(ids: TokenIds, vocab_size: int) -> list[int]:
    """Return ids to decode as a list.

    Raises TokenizerError for an id outside 0 .. vocab_size - 1, with its position.
    """
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if array.size == 0:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenizerError(
            f"decode: found shape {array.shape} of {array.dtype}; expected a flat sequence of"
            " integer ids"
        )
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise TokenizerError(
            f"decode: id {array[at]} at position {at} is outside 0..{vocab_size - 1}; were"
            " these ids made by another tokenizer, or drawn from the padded part of the"
            " vocabulary?"
        )
    found: list[int] = array.tolist()
    return found


def refuse_surrogate(texts: Sequence[str], error: Exception) -> NoReturn:
    """Raise TokenizerError with the place of the surrogate that a library rejected.

    Without one, raise ``error``.
    """
    for number, text in enumerate(texts):
        at = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if at is None:
            continue
        name = "the text" if len(texts) == 1 else f"text {number} of the batch"
        line = text.count("\n", 0, at) + 1
        raise TokenizerError(
            f"{name}, character {at} (line {line}): the surrogate U+{ord(text[at]):04X} is"
            " half a character and has no UTF-8; read the source with its right encoding, or"
            " replace it with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from None
    raise error

"""BERT's tokenizer at the speed of numpy.

Characters that are always tokens of their own are looked up in a table. The library ``tokenizers``
encodes the text between them.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from common.tokenizer.base import PackedIds
from common.tokenizer.words import BertVocabulary, WordEncoder

_CHINESE = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2CEAF)),
    *((0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)
"""First and last code point of the ranges that BERT treats as Chinese."""
_UNCHANGED = _CHINESE[:2]
"""Ranges of Chinese that normalization does not change."""
_SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~‐–—―‘’“”…·、。〈〉《》「」『』【】〔〕〖〗！（），．：；？［］｛｝"
"""Frequent punctuation."""
SPACES = " \t\n\r\u3000\xa0"
ALONE = "".join(f"{chr(first)}-{chr(last)}" for first, last in _UNCHANGED) + re.escape(_SIGNS)
"""Content of a regular expression's brackets: characters that are tokens in any context."""
_SEPARATES, _IN_WORD = -1, -2


def is_chinese(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _CHINESE)


class CharacterEncoder:
    """Encoder whose ids equal those of ``tokenizers`` for every text.

    A Chinese character, a sign of punctuation and white space end the word before them. None of
    them composes with its neighbours. A run of other characters therefore has the same ids by
    itself.
    """

    def __init__(self, vocabulary: BertVocabulary, *, lower_case: bool) -> None:
        self._words = WordEncoder(vocabulary, lower_case=lower_case, split_chinese=True)
        unknown = vocabulary.ids["[UNK]"]
        self._table = np.full(0x110000, _IN_WORD, dtype=np.int32)
        for first, last in _UNCHANGED:
            self._table[first : last + 1] = [vocabulary.ids.get(chr(code), unknown) for code in range(first, last + 1)]
        for sign in _SIGNS:
            self._table[ord(sign)] = vocabulary.ids.get(sign, unknown)
        for space in SPACES:
            self._table[ord(space)] = _SEPARATES

    def encode_many(self, texts: list[str]) -> PackedIds:
        """Encode texts. Raises UnicodeEncodeError for a lone surrogate."""
        joined = " ".join(texts)  # a space ends a word, as the end of a text does
        found = self._table[np.frombuffer(joined.encode("utf-32-le"), dtype=np.uint32)]
        counts = (found >= 0).astype(np.int64)
        in_word = np.flatnonzero(found == _IN_WORD)
        if len(in_word):
            jumps = np.flatnonzero(np.diff(in_word) > 1)
            starts = in_word[np.concatenate([[0], jumps + 1])]
            stops = in_word[np.concatenate([jumps, [-1]])] + 1
            words = [joined[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            pieces, counts[starts] = self._words.encode(words)
            ends = np.cumsum(counts)
            ids = np.empty(ends[-1], dtype=np.int32)
            alone = found >= 0
            ids[ends[alone] - 1] = found[alone]
            ids[_positions(ends[starts], counts[starts])] = pieces
        else:
            ends = np.cumsum(counts)
            ids = found[found >= 0]
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        bounds = np.cumsum(lengths + 1) - 1  # position of each text's end among the characters
        tokens_before = np.concatenate([[0], ends])
        return PackedIds(ids=ids, offsets=np.concatenate([[0], tokens_before[bounds]]))


def _positions(ends: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the places of runs of ``counts`` entries that end before ``ends``."""
    before = np.cumsum(counts) - counts
    places: npt.NDArray[np.int64] = np.repeat(ends - counts - before, counts)
    return places + np.arange(int(counts.sum()))

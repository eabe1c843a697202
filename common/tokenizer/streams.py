"""Decoding as ids come, for the kinds of tokenizers whose pieces are bytes, or cannot be decoded
one by one.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_PART = "\ufffd"
_CONTEXT = 16
"""Ids that are decoded again with those that follow them."""


class ByteStream:
    """Text of ids that stand for bytes."""

    def __init__(self, decode_bytes: Callable[[Sequence[int]], bytes]) -> None:
        self._decode_bytes = decode_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        return self._decoder.decode(self._decode_bytes(ids), final)


class WindowStream:
    """Text of ids through a library that decodes whole sequences: the text of the last pieces with
    what follows them, less the text of those pieces alone.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(after[-_CONTEXT:])
        self._shown = len(self._ids)

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        self._ids += ids
        first = max(0, self._shown - _CONTEXT)
        text = self._decode(self._ids[first:])
        if text.endswith(_PART) and not final:
            return ""
        before = self._decode(self._ids[first : self._shown])
        self._shown = len(self._ids)
        return text[len(before) :]

"""Decoding of ids as they arrive, for pieces that are bytes or cannot be decoded one by one."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from common.tokenizer.text_tokenizer import Tokenizer

_PART = "\ufffd"
_CONTEXT = 16
"""Earlier ids that are decoded again with new ones."""


class ByteStream:
    """Decoder of ids that stand for bytes."""

    def __init__(self, decode_bytes: Callable[[Sequence[int]], bytes], after: Sequence[int] = ()) -> None:
        self._decode_bytes = decode_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.push(after[-_CONTEXT:])

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        return self._decoder.decode(self._decode_bytes(ids), final)


class WindowStream:
    """Decoder through a library that decodes only whole sequences.

    It decodes the last pieces with and without the new ones; the difference is the new text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0
        for each in after[-_CONTEXT:]:  # which may end within a character
            self.push([each])

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        self._ids += ids
        first = max(0, self._shown - _CONTEXT)
        text = self._decode(self._ids[first:])
        if text.endswith(_PART) and not final:
            return ""
        before = self._decode(self._ids[first : self._shown])
        self._shown = len(self._ids)
        return text[len(before) :]


def whole_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids, without a character that they begin and do not end.

    It is what precedes the text of ``tokenizer.stream(ids)``.
    """
    stream = tokenizer.stream()
    return "".join(stream.push([each]) for each in ids)

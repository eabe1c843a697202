"""Encoding of documents and prompts. Only their frames differ."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from common.tokenizer.base import Ids, PackedIds
from common.tokenizer.marks import encode_around
from common.tokenizer.text_tokenizer import Tokenizer

_LINE_END = re.compile("\n")


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool | None = None) -> PackedIds:
    """Return the ids of each text, with the tokenizer's newline mark between its lines.

    special: special tokens in a text are these tokens, else ordinary text; left out, it is the
    tokenizer's ``has_marks``.
    """
    special = tokenizer.has_marks if special is None else special
    mark = tokenizer.framing.newline
    if mark is None:
        return tokenizer.encode_packed(texts, special)
    return encode_around(_LINE_END, lambda _: mark, lambda lines: tokenizer.encode_packed(lines, special), texts)


def encode_words(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids of a text that stands within another. Special tokens in it are tokens."""
    if tokenizer.framing.newline is None:
        return tokenizer.encode(text, allow_special=True)
    return encode_documents(tokenizer, [text], special=True).ids


def encode_prompt(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids of a prompt: those of its words, behind the token that transformers puts
    before every text, if there is one.
    """
    ids, begin = encode_words(tokenizer, text), tokenizer.framing.begin
    return np.concatenate([np.array(begin, np.int32), ids]) if begin else ids

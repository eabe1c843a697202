"""Line ends within documents and prompts, for tokenizers that have a mark for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from common.tokenizer.base import Ids, PackedIds, Tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> PackedIds:
    """Return the ids of each text, with the tokenizer's newline mark between its lines."""
    mark = tokenizer.framing.newline
    if mark is None or not any("\n" in text for text in texts):
        return tokenizer.encode_packed(texts)
    lines = [text.split("\n") for text in texts]
    packed = tokenizer.encode_packed(list(chain.from_iterable(lines)))
    counts = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
    stops = np.cumsum(counts)
    # a mark after each line except the last one of each text
    marked = np.ones(int(stops[-1]), dtype=np.int64)
    marked[stops - 1] = 0
    ends = np.cumsum(packed.lengths + marked)
    ids = np.full(int(ends[-1]), mark, dtype=np.int32)
    is_text = np.ones(len(ids), dtype=np.bool_)
    is_text[ends[marked == 1] - 1] = False
    ids[is_text] = packed.ids
    return PackedIds(ids=ids, offsets=np.concatenate([[0], ends[stops - 1]]))


def encode_prompt(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids of a prompt. Special tokens in it are encoded as such, line ends as in
    documents.
    """
    mark = tokenizer.framing.newline
    if mark is None or "\n" not in text:
        return tokenizer.encode(text, allow_special=True)
    parts: list[Ids] = []
    for line in text.split("\n"):
        parts += [np.array([mark], dtype=np.int32), tokenizer.encode(line, allow_special=True)]
    return np.concatenate(parts[1:])

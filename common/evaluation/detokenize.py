"""Undo the tokenization of published corpora.

Otherwise a byte-level tokenizer would see their words in an unnatural spelling.
"""

from __future__ import annotations

import re
from collections.abc import Callable


def keep(text: str) -> str:
    return text


def detokenize_wikitext(text: str) -> str:
    """Remove the spaces that WikiText puts around punctuation, and the marks @-@ @,@ @.@ inside
    words and numbers.

    Rules and order are those of Megatron-LM, tasks/zeroshot_gpt/detokenizer.py, and of lm-eval's
    task wikitext. One rule is left out: it looks for ' between slashes, which no text has.
    """
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for pattern, replacement in _PAIRS:
        text = pattern.sub(replacement, text)
    for length in (4, 3, 2):
        text = text.replace(" ".join("=" * length), "=" * length)
    for spaced, plain in (
        (" ° ", "°"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ):
        text = text.replace(spaced, plain)
    return text


_PAIRS = [
    (re.compile(rf"\{opening}\s*([^\{closing}]*?)\s*\{closing}"), rf"{opening}\1{closing}")
    for opening, closing in ("()", "[]", "{}")
] + [(re.compile(rf"{quote}\s*([^{quote}]*?)\s*{quote}"), rf"{quote}\1{quote}") for quote in "\"'"]

DETOKENIZERS: dict[str, Callable[[str], str]] = {"none": keep, "wikitext": detokenize_wikitext}
"""Functions by the values of evaluation.detokenize."""

"""Undo the tokenization of published corpora, whose words a byte-level tokenizer would otherwise
see in an unnatural spelling.
"""

from __future__ import annotations

import re
from collections.abc import Callable


def keep(text: str) -> str:
    return text


def detokenize_wikitext(text: str) -> str:
    """Take out the spaces that WikiText puts around punctuation, and the marks @-@ @,@ @.@ inside
    words and numbers.

    The rules and their order are those of Megatron-LM, tasks/zeroshot_gpt/detokenizer.py, which
    lm-eval's task wikitext has too; one is left out: it looks for ' between slashes, and no text
    has that.
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
"""By the values of evaluation.detokenize."""

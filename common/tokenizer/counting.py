"""Counts of a corpus's tokens, for vocabularies of characters or of words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from common.tokenizer.characters import ALONE, SPACES
from common.tokenizer.words import CONTINUES, SPECIAL, Segmenter, bert_words

FIRST = ("[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]")
"""Special tokens in the order of GPT2-Chinese's make_vocab.py."""
assert set(FIRST) == set(SPECIAL)
_RUN = re.compile(f"[^{ALONE}{SPACES}]+")


def count_characters(texts: Iterable[str], *, lower_case: bool = True) -> Counter[str]:
    """Count the tokens that BERT's tokenizer makes of single characters.

    These are Chinese characters, signs and first letters of words. Other letters of words have
    ``##`` in front.
    """
    characters: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    for text in texts:
        characters.update(text)
        runs.update(_RUN.findall(text))
    inside = re.compile(f"[{ALONE}]")
    counts = Counter({char: n for char, n in characters.items() if inside.fullmatch(char)})
    for word, number in _words(runs, lower_case=lower_case, split_chinese=True):
        counts[word[0]] += number
        for letter in word[1:]:
            counts[CONTINUES + letter] += number
    return counts


def count_words(texts: Iterable[str]) -> Counter[str]:
    """Count the words of Chinese text. Raises TokenizerError if the library that cuts it is not
    installed.
    """
    segmenter = Segmenter()
    found: Counter[str] = Counter()
    for text in texts:
        found.update(segmenter.cut(text))
    counts: Counter[str] = Counter()
    for word, number in _words(found, lower_case=True, split_chinese=False):
        counts[word] += number
    return counts


def _words(
    runs: Counter[str], *, lower_case: bool, split_chinese: bool
) -> Iterable[tuple[str, int]]:
    split = bert_words(lower_case=lower_case, split_chinese=split_chinese)
    for run, number in runs.items():
        for word in split(run):
            yield word, number


def most_frequent(counts: Counter[str], size: int) -> list[str]:
    """Return the special tokens, then the ``size`` most frequent tokens.

    Tokens of equal frequency are in the order of their code points.
    """
    ordered = sorted(((-number, token) for token, number in counts.items() if token not in FIRST))
    return [*FIRST, *(token for _, token in ordered[:size])]

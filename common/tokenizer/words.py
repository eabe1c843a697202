"""Words of BERT's vocabularies: vocab.txt, the ids of a word's pieces, Chinese text as words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import TokenizerError
from common.paths import install
from common.tokenizer.base import Ids, PackedIds
from common.tokenizer.folder import read_vocabulary_text

_CACHED_WORDS = 1 << 18
_CACHED_LENGTH = 32
_FEW = 16


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"
"""Prefix of a token that continues a word."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BertVocabulary:
    """Content of a vocab.txt.

    tokens: indexed by id. An empty one is a line without a token; no text has its id. ids: token ->
    id.
    """

    tokens: tuple[str, ...]
    ids: dict[str, int]

    def sha256(self, kind: str) -> str:
        """Return the hex digest of the content and a kind. It does not depend on the form of line
        ends.
        """
        content = "\n".join((f"{kind}/1", *self.tokens))
        return hashlib.sha256(content.encode()).hexdigest()


def read_bert_vocabulary(path: Path) -> BertVocabulary:
    """Read vocab.txt: a token a line, whose id is the number of the line from 0. Raises
    TokenizerError that names the file, the line and the remedy.
    """
    text = read_vocabulary_text(path, "vocabulary of a BERT tokenizer (one token a line)")
    if text.lstrip().startswith("{"):
        raise TokenizerError(
            f"{path}: is JSON, expected one token a line; a vocab.json goes with its merges.txt,"
            " a tokenizer.json with type HuggingFaceTokenizer"
        )
    # not splitlines: U+2028 and similar characters are tokens of published vocabularies
    tokens = tuple(text.replace("\r\n", "\n").rstrip("\n").split("\n"))
    ids = {token: number for number, token in enumerate(tokens) if token}
    if len(ids) < len(tokens) - tokens.count(""):
        twice = next(token for number, token in enumerate(tokens) if token and ids[token] != number)
        raise TokenizerError(
            f"{path}: line {ids[twice] + 1}: the token {twice!r} stands on line"
            f" {tokens.index(twice) + 1} already; expected each token once; remove one of them"
        )
    if missing := [token for token in SPECIAL if token not in ids]:
        raise TokenizerError(
            f"{path}: its {len(tokens)} lines lack the special tokens {' '.join(missing)}; expected"
            f" {' '.join(SPECIAL)}, each on a line of its own; add them, or write a vocabulary with"
            " tools/make_vocab.py"
        )
    return BertVocabulary(tokens=tokens, ids=ids)


class WordEncoder:
    """WordPiece for runs of text, by the library ``tokenizers``. Frequent runs are cached.

    split_chinese: make a word of each Chinese character, as BERT does.
    """

    def __init__(self, vocabulary: BertVocabulary, *, lower_case: bool, split_chinese: bool) -> None:
        self.model = build_wordpiece(vocabulary, lower_case=lower_case, split_chinese=split_chinese)
        self._cache: dict[str, list[int]] = {}

    def encode(self, words: Sequence[str]) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Return the ids of all words in sequence, and the number of ids of each word."""
        known = self._cache
        new = list({word: None for word in words if word not in known})
        found = dict(zip(new, self._pieces(new), strict=True))
        rows = [known[word] if word in known else found[word] for word in words]
        short = {word: ids for word, ids in found.items() if len(word) <= _CACHED_LENGTH}
        # a single assignment, so that other threads see either the old words or the new ones
        self._cache = short if len(known) > _CACHED_WORDS else known | short if short else known
        counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(counts.sum()))
        return flat, counts

    def _pieces(self, words: list[str]) -> list[list[int]]:
        if len(words) < _FEW:  # once it has used threads, the library warns in every forked child
            return [self.model.encode(word).ids for word in words]
        return [encoding.ids for encoding in self.model.encode_batch_fast(words)]


def build_wordpiece(vocabulary: BertVocabulary, *, lower_case: bool, split_chinese: bool) -> Any:
    """Return a tokenizer of ``tokenizers`` with the settings of transformers' BertTokenizer.

    It has no special tokens: they are ordinary text.
    """
    from tokenizers import Tokenizer, models

    model = Tokenizer(models.WordPiece(vocabulary.ids, unk_token="[UNK]"))  # noqa: S106
    model.normalizer, model.pre_tokenizer = bert_steps(lower_case, split_chinese)
    return model


def bert_words(*, lower_case: bool, split_chinese: bool) -> Callable[[str], list[str]]:
    """Return a function that cuts text into the words that BERT's tokenizer cuts into pieces."""
    normalizer, pre_tokenizer = bert_steps(lower_case, split_chinese)
    return lambda text: [word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))]


def bert_steps(lower_case: bool, split_chinese: bool) -> tuple[Any, Any]:
    """Return normalizer and pre-tokenizer with the settings of transformers' BertTokenizer."""
    from tokenizers import normalizers, pre_tokenizers

    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=split_chinese, strip_accents=None, lowercase=lower_case
    ), pre_tokenizers.BertPreTokenizer()


class Segmenter:
    """Cutter of Chinese text into words by jieba's dictionary. Digits are tokens of their own.

    Source: GPT2-Chinese, tokenizations/tokenization_bert_word_level.py, which uses thulac instead.
    """

    def __init__(self) -> None:
        try:
            import rjieba
        except ImportError as error:
            raise TokenizerError(
                f"BertWordLevel cuts Chinese into words with rjieba, which is not installed"
                f" ({error}); install it with: {install('chinese')}, or take the type"
                " BertWordPieceLowerCase"
            ) from None
        from tokenizers.normalizers import BertNormalizer

        self._cut = rjieba.cut
        self._clean = BertNormalizer(
            clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False
        ).normalize_str

    def cut(self, text: str) -> list[str]:
        words: list[str] = self._cut(_DIGIT.sub(r" \g<0> ", self._clean(text)))
        return words


class WordLevelEncoder:
    """Encoder of Chinese words.

    A word that the vocabulary lacks is cut into pieces or becomes ``[UNK]``.
    """

    def __init__(self, vocabulary: BertVocabulary) -> None:
        self._segmenter = Segmenter()
        self._words = WordEncoder(vocabulary, lower_case=True, split_chinese=False)

    def encode_many(self, texts: list[str]) -> PackedIds:
        words: list[str] = []
        stops = [0]
        for text in texts:
            words += self._segmenter.cut(text)
            stops.append(len(words))
        ids, counts = self._words.encode(words)
        offsets = np.concatenate([[0], np.cumsum(counts)])[stops]
        return PackedIds(ids=ids, offsets=offsets.astype(np.int64))


_DIGIT = re.compile(r"\d")

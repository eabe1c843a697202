"""BERT's tokenizer over vocab.txt.

A Chinese character is a token, and other words are cut into pieces. The ids equal those of
transformers' BertTokenizer.
Source of the algorithm: google-research/bert, tokenization.py. The frame of documents and the
spelling of decoded text are those of GPT2-Chinese (train.py, generate.py).

Characters that are always tokens of their own are looked up in a table, at the speed of numpy. A
Chinese character, a sign of punctuation and white space end the word before them, and none of them
composes with its neighbours. A run of other characters therefore has the same ids by itself; the
library ``tokenizers`` encodes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import TokenizerError
from common.paths import require_package
from common.tokenizer.base import Ids, PackedIds, TextStream, TokenIds
from common.tokenizer.folder import Folder, read_vocabulary_text
from common.tokenizer.marks import framing_of, read_marks
from common.tokenizer.text_tokenizer import Tokenizer, checked_ids

_SPOKEN = {"[MASK]": "", "[PAD]": "", "[CLS]": "\n\n", "[SEP]": "\n"}


class BertTokenizer(Tokenizer):
    """Tokenizer whose documents are ``[MASK] ... [CLS]``, with ``[SEP]`` between lines."""

    def __init__(self, file: Path, kind: str) -> None:
        """Build from vocab.txt. kind: BertWordPieceLowerCase, BertWordPieceCase, or BertWordLevel, which cuts Chinese
        into words. A word that the vocabulary lacks is cut into pieces or becomes ``[UNK]``.
        """
        from tokenizers import Tokenizer as Model, models

        tokens = read_bert_vocabulary(file)
        ids = {token: number for number, token in enumerate(tokens) if token}
        self._cut = word_cutter() if kind == "BertWordLevel" else None
        # the digest does not depend on the form of line ends
        content = "\n".join((f"{kind}/1", *tokens))
        marks = read_marks(Folder(file.parent), ids, SPECIAL, {"pad_token": "[PAD]"})
        super().__init__(
            file,
            kind=kind,
            backend="rjieba" if self._cut else "tokenizers",
            sha256=marks.sha256(hashlib.sha256(content.encode()).hexdigest()),
            marks=marks,
            framing=framing_of(marks, file),
            unknown_id=ids["[UNK]"],
        )
        later = {number: text for text, number in self.added.items()}
        self.tokens = (*tokens, *(later.get(number, "") for number in range(len(tokens), self.vocab_size)))
        # transformers' BertTokenizer without its special tokens, which are ordinary text
        self._model = Model(models.WordPiece(ids, unk_token="[UNK]"))  # noqa: S106
        steps = bert_steps(kind != "BertWordPieceCase", split_chinese=not self._cut)
        self._model.normalizer, self._model.pre_tokenizer = steps
        self._cache: dict[str, list[int]] = {}
        if self._cut:
            return
        self._table = np.full(0x110000, _IN_WORD, dtype=np.int32)
        for code in (*chain(*(range(first, last + 1) for first, last in _UNCHANGED)), *map(ord, _SIGNS)):
            self._table[code] = ids.get(chr(code), ids["[UNK]"])
        self._table[[ord(space) for space in SPACES]] = _SEPARATES

    def _encode_many(self, texts: list[str]) -> PackedIds:
        if self._cut is None:
            return self._encode_characters(texts)
        words = [self._cut(text) for text in texts]
        stops = np.cumsum([0, *map(len, words)])
        ids, counts = self._encode_words([*chain(*words)])
        return PackedIds(ids=ids, offsets=np.concatenate([[0], np.cumsum(counts)])[stops].astype(np.int64))

    def _encode_characters(self, texts: list[str]) -> PackedIds:
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
            pieces, counts[starts] = self._encode_words(words)
            ends = np.cumsum(counts)
            ids = np.empty(ends[-1], dtype=np.int32)
            alone = found >= 0
            ids[ends[alone] - 1] = found[alone]
            own = counts[starts]
            shifts = np.repeat(ends[starts] - np.cumsum(own), own)  # of each word's ids among all of them
            ids[shifts + np.arange(len(pieces))] = pieces
        else:
            ends = np.cumsum(counts)
            ids = found[found >= 0]
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        bounds = np.cumsum(lengths + 1) - 1  # position of each text's end among the characters
        tokens_before = np.concatenate([[0], ends])
        return PackedIds(ids=ids, offsets=np.concatenate([[0], tokens_before[bounds]]))

    def _encode_words(self, words: Sequence[str]) -> tuple[Ids, npt.NDArray[np.int64]]:
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
            return [self._model.encode(word).ids for word in words]
        return [encoding.ids for encoding in self._model.encode_batch_fast(words)]

    def decode(self, ids: TokenIds) -> str:
        return self.stream()(checked_ids(ids, self.vocab_size), final=True)

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Join tokens: Chinese without spaces, words of letters and numbers with one space.

        No id is a part of a character, so no text is held back.
        """
        last = self.tokens[after[-1]][-1:] if after else ""

        def push(ids: Sequence[int], final: bool = False) -> str:
            nonlocal last
            spoken: list[str] = []
            for token_id in checked_ids(ids, len(self.tokens)):
                token = self.tokens[token_id]
                if token.startswith(CONTINUES) and len(token) > len(CONTINUES):
                    token = token[len(CONTINUES) :]
                elif _are_words(last, token[:1]):
                    spoken.append(" ")
                spoken.append(_SPOKEN.get(token, token))
                last = token[-1:]
            return "".join(spoken)

        return push


def _are_words(left: str, right: str) -> bool:
    """Return whether a space separates two tokens, given the last character of one and the first of the next.

    Two numbers have no space between them, since a word-level vocabulary has single digits.
    """
    if not (left.isalnum() and right.isalnum()) or (left.isdigit() and right.isdigit()):
        return False
    return not any(first <= ord(each) <= last for first, last in _CHINESE for each in (left, right))


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


_CACHED_WORDS = 1 << 18
_CACHED_LENGTH = 32
_FEW = 16
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"
"""Prefix of a token that continues a word."""


def read_bert_vocabulary(path: Path) -> tuple[str, ...]:
    """Return the tokens of vocab.txt, one a line, by id from 0. An empty one is a line without a token; no text has
    its id. Raises TokenizerError that names the file, the line and the remedy.
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
    return tokens


def bert_steps(lower_case: bool, split_chinese: bool) -> tuple[Any, Any]:
    """Return normalizer and pre-tokenizer with the settings of transformers' BertTokenizer."""
    from tokenizers import normalizers, pre_tokenizers

    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=split_chinese, strip_accents=None, lowercase=lower_case
    ), pre_tokenizers.BertPreTokenizer()


def word_cutter() -> Callable[[str], list[str]]:
    """Return what cuts Chinese text into words by jieba's dictionary. Digits are tokens of their own.

    Source: GPT2-Chinese, tokenizations/tokenization_bert_word_level.py, which uses thulac instead.
    Raises TokenizerError if the library is not installed.
    """
    purpose = "which cuts Chinese into words for BertWordLevel (BertWordPieceLowerCase needs no words)"
    rjieba = require_package("rjieba", extra="chinese", purpose=purpose, error=TokenizerError)
    from tokenizers.normalizers import BertNormalizer

    clean = BertNormalizer(clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False)

    def cut(text: str) -> list[str]:
        words: list[str] = rjieba.cut(re.sub(r"\d", r" \g<0> ", clean.normalize_str(text)))
        return words

    return cut

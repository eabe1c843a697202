"""BERT's tokenizer over vocab.txt.

A Chinese character is a token, and other words are cut into pieces. The ids equal those of
transformers' BertTokenizer.
Source of the algorithm: google-research/bert, tokenization.py. The frame of documents and the
spelling of decoded text are those of GPT2-Chinese (train.py, generate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from common.tokenizer.base import PackedIds, TokenIds
from common.tokenizer.characters import CharacterEncoder, is_chinese
from common.tokenizer.folder import Folder
from common.tokenizer.marks import framing_of, read_marks
from common.tokenizer.text_tokenizer import TextTokenizer, checked_ids
from common.tokenizer.words import CONTINUES, SPECIAL, BertVocabulary, WordLevelEncoder, read_bert_vocabulary

_SPOKEN = {"[MASK]": "", "[PAD]": "", "[CLS]": "\n\n", "[SEP]": "\n"}


class BertTokenizer(TextTokenizer):
    """Tokenizer whose documents are ``[MASK] ... [CLS]``, with ``[SEP]`` between lines."""

    def __init__(
        self,
        file: Path,
        kind: str,
        vocabulary: BertVocabulary,
        encode_many: Callable[[list[str]], PackedIds],
        backend: str,
    ) -> None:
        ids = vocabulary.ids
        marks = read_marks(Folder(file.parent), ids, SPECIAL, {"pad_token": "[PAD]"})
        super().__init__(
            file,
            kind=kind,
            backend=backend,
            sha256=marks.sha256(vocabulary.sha256(kind)),
            marks=marks,
            framing=framing_of(marks, file),
            unknown_id=ids["[UNK]"],
        )
        self.vocabulary = vocabulary
        later = {number: text for text, number in self.added.items()}
        first = len(vocabulary.tokens)
        self.tokens = (*vocabulary.tokens, *(later.get(number, "") for number in range(first, self.vocab_size)))
        self._run = encode_many

    @classmethod
    def from_file(cls, file: Path, kind: str) -> Self:
        """Build from vocab.txt. kind: BertWordPieceLowerCase, BertWordPieceCase or
        BertWordLevel.
        """
        vocabulary = read_bert_vocabulary(file)
        if kind == "BertWordLevel":
            return cls(file, kind, vocabulary, WordLevelEncoder(vocabulary).encode_many, "rjieba")
        characters = CharacterEncoder(vocabulary, lower_case=kind != "BertWordPieceCase")
        return cls(file, kind, vocabulary, characters.encode_many, "tokenizers")

    def _encode_many(self, texts: list[str]) -> PackedIds:
        return self._run(texts)

    def piece(self, token_id: int) -> str:
        return self.tokens[token_id]

    def decode(self, ids: TokenIds) -> str:
        return self.stream().push(checked_ids(ids, self.vocab_size), final=True)

    def stream(self, after: Sequence[int] = ()) -> _Joiner:
        return _Joiner(self.tokens, after)


class _Joiner:
    """Joins pieces into text: Chinese without spaces, words of letters and numbers with one space.

    No id is a part of a character, so no text is held back.
    """

    def __init__(self, tokens: tuple[str, ...], after: Sequence[int]) -> None:
        self._tokens = tokens
        self._last = tokens[after[-1]][-1:] if after else ""

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        spoken: list[str] = []
        for token_id in checked_ids(ids, len(self._tokens)):
            token = self._tokens[token_id]
            if token.startswith(CONTINUES) and len(token) > len(CONTINUES):
                token = token[len(CONTINUES) :]
            elif _are_words(self._last, token[:1]):
                spoken.append(" ")
            spoken.append(_SPOKEN.get(token, token))
            self._last = token[-1:]
        return "".join(spoken)


def _are_words(left: str, right: str) -> bool:
    """Return whether a space separates two tokens, given the last character of one and the first of
    the next.

    Two numbers have no space between them, since a word-level vocabulary has single digits.
    """
    return (
        left.isalnum()
        and right.isalnum()
        and not (left.isdigit() and right.isdigit())
        and not is_chinese(left)
        and not is_chinese(right)
    )

"""Read and check vocab.txt of a BERT tokenizer.

It has one token a line, whose id is the number of the line from 0.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from common.errors import TokenizerError
from common.tokenizer.text_files import read_vocabulary_text

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
    """Read vocab.txt. Raises TokenizerError that names the file, the line and the remedy."""
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

"""Comparison of the vocabularies of the data, of data.tokenizer and of the model, before the first
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import ConfigError

PADDING = 128
"""Multiple to which tables are padded. Fewer rows than this beyond the tokens give no warning."""


def vocabulary_remarks(
    made_with: Mapping[str, Any] | None,
    tokenizer: Mapping[str, Any] | None,
    vocab_size: int,
    *,
    share_of_row: float = 0.0,
) -> list[str]:
    """Return warnings. Raises ConfigError for a tokenizer with more tokens than the model has rows,
    where the data's has not.

    made_with: kind, sha256 and vocab_size of the tokenizer of the data; None if unknown.
    tokenizer: the same facts about data.tokenizer.
    vocab_size: the model's, without padding. share_of_row: part of all parameters in one row of the
    table.
    """
    remarks = []
    if made_with is not None and tokenizer is not None and made_with["sha256"] != tokenizer["sha256"]:
        remarks.append(
            f"the data were made with {_describe(made_with)}, and data.tokenizer is"
            f" {_describe(tokenizer)}: the model learns the tokens of the data, and predict with the"
            " other would be refused; set data.tokenizer to the folder of the data's, or preprocess"
            " again"
        )
        if tokenizer["vocab_size"] > vocab_size:
            raise ConfigError(remarks[0])
    record = made_with or tokenizer
    if record is not None and vocab_size > -(-record["vocab_size"] // PADDING) * PADDING:
        tokens = record["vocab_size"]
        share = f", {(vocab_size - tokens) * share_of_row:.0%} of all parameters" if share_of_row else ""
        remarks.append(
            f"model.vocab_size={vocab_size}, but the tokenizer has {tokens} tokens: no token"
            f" uses {vocab_size - tokens} rows of the embedding{share}; a new model avoids"
            f" them with model.vocab_size={tokens}"
        )
    return remarks


def _describe(record: Mapping[str, Any]) -> str:
    return f"{record['kind']} of {record['vocab_size']} tokens (sha256 {record['sha256'][:12]})"

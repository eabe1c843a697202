"""Comparison of the vocabularies of the data, of data.tokenizer and of the model, before the first
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError

PADDING = 128
"""Multiple to which tables are padded. Fewer rows than this beyond the tokens give no warning."""


def vocabulary_remarks(
    data_tokenizers: Sequence[Mapping[str, Any] | None],
    tokenizer: Mapping[str, Any] | None,
    vocab_size: int,
    *,
    share_of_row: float = 0.0,
) -> list[str]:
    """Return warnings. Raises ConfigError if a tokenizer has more tokens than the model has rows.

    data_tokenizers: kind, sha256 and vocab_size of the tokenizer of each part of the data; None if
    unknown. tokenizer: the same facts about data.tokenizer.
    vocab_size: the model's, without padding. share_of_row: part of all parameters in one row of the
    table.
    """
    made_with = list({record["sha256"]: record for record in data_tokenizers if record is not None}.values())
    remarks = [
        f"the data were made with {_describe(record)}, and data.tokenizer is"
        f" {_describe(tokenizer)}: the model learns the tokens of the data, and predict with the"
        " other would be refused; set data.tokenizer to the folder of the data's, or preprocess"
        " again"
        for record in made_with
        if tokenizer is not None and record["sha256"] != tokenizer["sha256"]
    ]
    for name, record in [
        *(("the tokenizer of the data", record) for record in made_with),
        ("data.tokenizer", tokenizer),
    ]:
        if record is not None and record["vocab_size"] > vocab_size:
            raise ConfigError(
                remarks[0]
                if remarks and record is tokenizer
                else f"{name} has {record['vocab_size']} tokens and model.vocab_size={vocab_size}"
                f" is less; set model.vocab_size={record['vocab_size']}, or give a tokenizer"
                " that fits"
            )
    used = [record["vocab_size"] for record in made_with] or (
        [tokenizer["vocab_size"]] if tokenizer is not None else []
    )
    if used and vocab_size > -(-max(used) // PADDING) * PADDING:
        tokens = max(used)
        share = f", {(vocab_size - tokens) * share_of_row:.0%} of all parameters" if share_of_row else ""
        remarks.append(
            f"model.vocab_size={vocab_size}, but the tokenizer has {tokens} tokens: no token"
            f" uses {vocab_size - tokens} rows of the embedding{share}; a new model avoids"
            f" them with model.vocab_size={tokens}"
        )
    return remarks


def _describe(record: Mapping[str, Any]) -> str:
    return f"{record['kind']} of {record['vocab_size']} tokens (sha256 {record['sha256'][:12]})"

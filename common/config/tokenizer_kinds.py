"""Kinds of tokenizers, and their names in Megatron and transformers."""

from __future__ import annotations

from typing import Any, Literal, get_args

TokenizerKind = Literal[
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "BertWordLevel",
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
]

ALIASES: dict[str, TokenizerKind | None] = {
    "GPT2Tokenizer": "GPT2BPETokenizer",
    "GPT2TokenizerFast": "GPT2BPETokenizer",
    "BertTokenizerFast": "BertWordPieceLowerCase",
    "BertTokenizer": "BertWordPieceLowerCase",
    "BertTokenizerLegacy": "BertWordPieceLowerCase",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "LlamaTokenizer": "SentencePieceTokenizer",
    "PreTrainedTokenizerFast": "HuggingFaceTokenizer",
    "TokenizersBackend": "HuggingFaceTokenizer",
    "AutoTokenizer": None,
}
"""Other name -> kind; None means that the files decide."""
NAMES = (*get_args(TokenizerKind), *ALIASES)


def kind_named(value: Any) -> Any:
    """Return the kind that a name stands for; any other value is returned unchanged."""
    return ALIASES.get(value, value) if isinstance(value, str) else value

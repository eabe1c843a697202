"""The kinds of tokenizers, and the names that Megatron and transformers have for them."""

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
"""Other name -> kind; None is told from the files."""
NAMES = (*get_args(TokenizerKind), *ALIASES)


def kind_named(value: Any) -> Any:
    """Return the kind that a name stands for; what is no name of a kind is returned as it is."""
    return ALIASES.get(value, value) if isinstance(value, str) else value

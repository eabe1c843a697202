"""A tokenizer.json that holds what GPT-2 has: byte-level BPE, cut by GPT-2's pattern."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.tokenizer.folder import begin_of, read_tokenizer_json

_OTHER_BPE = (
    "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges",
)  # fmt: skip
"""Settings of a tokenizer.json's BPE that GPT-2's has not."""
Pairs = tuple[tuple[str, str], ...]


def is_byte_level(file: Path) -> bool:
    """Return whether a file is such a tokenizer.json. Raises TokenizerError unless it is JSON."""
    if not file.is_file():
        return False
    content = read_tokenizer_json(file)
    model, cut = content.get("model"), content.get("pre_tokenizer")
    if not (isinstance(model, Mapping) and isinstance(cut, Mapping)):
        return False
    ids, merges = model.get("vocab"), model.get("merges")
    return (
        model.get("type") == "BPE"
        and isinstance(ids, dict)
        and isinstance(merges, list)
        and not any(model.get(name) for name in _OTHER_BPE)
        and cut.get("type") == "ByteLevel"
        and cut.get("use_regex", True) is True
        and content.get("normalizer") is None
        and begin_of(content.get("post_processor")) is not None
        # an id that only added_tokens has may lie among those of the vocabulary
        and sorted(ids.values()) == list(range(len(ids)))
    )


def parts_of(content: Mapping[str, Any]) -> tuple[dict[str, int], Pairs, str | None, bool]:
    """Return the ids by token, the merges, the token that begins a text, and whether a space does
    too.
    """
    model, cut = content["model"], content["pre_tokenizer"]
    # a pair is one text in files before tokenizers 0.20
    merges = (each.split(" ") if isinstance(each, str) else each for each in model["merges"])
    begin = begin_of(content.get("post_processor"))
    return model["vocab"], tuple(map(tuple, merges)), begin, cut.get("add_prefix_space", True)

"""Begin, end and newline marks by the names that published vocabularies have for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from common.errors import TokenizerError
from common.tokenizer.base import Framing

ENDS = ("<|endoftext|>", "</s>", "<eos>", "<eod>", "<|end_of_text|>", "<|im_end|>")


def framing_of(ids: Mapping[str, int], file: Path, end: str | None = None) -> Framing:
    """Return the frame of documents.

    ids: of special tokens. end: end token named by a file beside the vocabulary.
    Raises TokenizerError if no token ends a document.
    """
    chinese = all(token in ids for token in ("[MASK]", "[CLS]", "[SEP]"))
    if chinese and end in (None, "[CLS]", "[SEP]"):  # GPT2-Chinese's frame
        return Framing(prefix=(ids["[MASK]"],), suffix=(ids["[CLS]"],), newline=ids["[SEP]"])
    for token in (end, *ENDS):
        if token is not None and token in ids:
            return Framing(suffix=(ids[token],))
    raise TokenizerError(
        f"{file}: has no token that ends a document; expected one of {', '.join(ENDS)}, or [MASK],"
        " [CLS] and [SEP]; add one to the vocabulary"
        " (tools/train_tokenizer.py does), or name it in tokenizer_config.json: eos_token"
    )

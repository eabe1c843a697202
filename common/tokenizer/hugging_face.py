"""Tokenizers from any tokenizer.json of Hugging Face, through the library ``tokenizers``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from common.errors import TokenizerError
from common.structured_files import (
    MAX_JSON_BYTES,
    MalformedError,
    parse_json,
    read_bytes,
    read_json_mapping,
)
from common.tokenizer.base import PackedIds, TokenIds
from common.tokenizer.checks import checked_ids
from common.tokenizer.marks import framing_of
from common.tokenizer.recognise import CONFIG
from common.tokenizer.streams import WindowStream
from common.tokenizer.text_tokenizer import TextTokenizer, pack


class HuggingFaceTokenizer(TextTokenizer):
    """Tokenizer of a tokenizer.json.

    Documents end with ``eos_token`` of tokenizer_config.json beside the file. Without one, they end
    with the first known end token of the vocabulary.
    """

    def __init__(self, file: Path, kind: str, model: Any, sha256: str, end: str | None) -> None:
        self._model = model
        vocabulary = model.get_vocab(with_added_tokens=True)
        added = model.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        # a vocabulary may hold its end of text without marking it as special
        known = {token: number for token, number in vocabulary.items() if token[:1] in "<["}
        unknown = getattr(model.model, "unk_token", None)
        super().__init__(
            file,
            kind=kind,
            backend="tokenizers",
            vocab_size=max(vocabulary.values(), default=-1) + 1,
            sha256=sha256,
            special=special,
            framing=framing_of(known | special, file, end),
            unknown_id=vocabulary.get(unknown) if unknown else None,
        )

    @classmethod
    def from_file(cls, file: Path, kind: str) -> Self:
        from tokenizers import Tokenizer

        raw = read_bytes(file, limit=MAX_JSON_BYTES, error=TokenizerError)
        try:
            content = repr(_sorted(parse_json(raw, unique=False))).encode()
            model = Tokenizer.from_buffer(raw)
        except MalformedError as error:
            raise TokenizerError(f"{file}: not JSON:  {error}; fetch the file again") from None
        except Exception as error:  # the library raises no more specific type
            raise TokenizerError(
                f"{file}: not a tokenizer.json ({len(raw)} bytes; {str(error)[:200]}); expected"
                " what Tokenizer.save of Hugging Face's tokenizers writes; fetch the file again"
            ) from None
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True  # special tokens within ordinary text are ordinary text
        return cls(file, kind, model, hashlib.sha256(content).hexdigest(), _end_named(file))

    def _encode_many(self, texts: list[str]) -> PackedIds:
        encode = self._model.encode_batch_fast
        return pack([encoding.ids for encoding in encode(texts, add_special_tokens=False)])

    def piece(self, token_id: int) -> str:
        text: str = self._model.id_to_token(token_id)
        return text

    def decode(self, ids: TokenIds) -> str:
        found = checked_ids(ids, self.vocab_size)
        text: str = self._model.decode(found, skip_special_tokens=False)
        return text

    def stream(self, after: Sequence[int] = ()) -> WindowStream:
        return WindowStream(self.decode, after)


def _sorted(value: Any) -> Any:
    """Return a JSON value with sorted keys."""
    if isinstance(value, dict):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return list(map(_sorted, value)) if isinstance(value, list) else value


def _end_named(file: Path) -> str | None:
    """Return eos_token of tokenizer_config.json beside the file, if there is one."""
    config = file.parent / CONFIG
    if not config.is_file():
        return None
    named = read_json_mapping(config, error=TokenizerError, finite=False).get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    return named if isinstance(named, str) else None

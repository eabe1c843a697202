"""Base of tokenizers whose ids stand for text instead of bytes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from common.tokenizer.base import Framing, Ids, PackedIds, TextStream, TokenIds
from common.tokenizer.checks import checked_text, checked_texts, decoded_texts, refuse_surrogate


class TextTokenizer(ABC):
    """Tokenizer of a single file.

    special: special tokens with their ids. It can be shared between threads. Pickling stores its
    file name, so a worker process builds its own.
    """

    def __init__(
        self,
        file: Path,
        *,
        kind: str,
        backend: str,
        vocab_size: int,
        sha256: str,
        special: Mapping[str, int],
        framing: Framing,
        unknown_id: int | None,
    ) -> None:
        self.file = file
        self.kind = kind
        self.backend = backend
        self.vocab_size = vocab_size
        self.sha256 = sha256
        self.special = dict(special)
        self.framing = framing
        self.eod_id = framing.suffix[-1]
        self.unknown_id = unknown_id
        longest_first = sorted(map(re.escape, self.special), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(longest_first)})") if special else None

    @abstractmethod
    def _encode_many(self, texts: list[str]) -> PackedIds:
        """Encode ordinary text. Raises TypeError or UnicodeError for a lone surrogate."""

    @abstractmethod
    def piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id."""

    @abstractmethod
    def decode(self, ids: TokenIds) -> str:
        """Return the text of ``ids``. Raises TokenizerError for an id outside the vocabulary."""

    @abstractmethod
    def stream(self, after: Sequence[int] = ()) -> TextStream: ...

    def encode(self, text: str, allow_special: bool = False) -> Ids:
        """Return the ids of ``text``, int32 (n,).

        Special tokens in the text are ordinary text, unless ``allow_special``.
        Raises TokenizerError for a lone surrogate, with its position.
        """
        checked_text(text)
        if not allow_special or self._special is None:
            return self._encode_strings([text]).ids
        parts: list[Ids] = []
        for part in self._special.split(text):
            if part in self.special:
                parts.append(np.array([self.special[part]], dtype=np.int32))
            else:
                parts.append(self._encode_strings([part]).ids)
        return np.concatenate(parts)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text as ordinary text: int32 arrays, views of one buffer."""
        return self._encode_strings(checked_texts(texts)).rows()

    def encode_packed(self, texts: Sequence[str] | Sequence[bytes]) -> PackedIds:
        """Encode like ``encode_batch``, into one buffer with offsets.

        Raises TokenizerError for bytes that are not UTF-8, with the text and the byte.
        """
        return self._encode_strings(decoded_texts(texts))

    def _encode_strings(self, texts: list[str]) -> PackedIds:
        try:
            return self._encode_many(texts)
        except (TypeError, UnicodeError) as error:
            refuse_surrogate(texts, error)

    def decode_bytes(self, ids: TokenIds) -> bytes:
        return self.decode(ids).encode()

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode_bytes([token_id])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.file, self.kind)

    @classmethod
    @abstractmethod
    def from_file(cls, file: Path, kind: str) -> Self:
        """Build from the file of a kind. Raises TokenizerError."""

    def __repr__(self) -> str:
        return f"{self.kind}({self.vocab_size} ids, file={str(self.file)!r})"


def _rebuild(cls: type[TextTokenizer], file: Path, kind: str) -> TextTokenizer:
    return cls.from_file(file, kind)


def pack(rows: Sequence[Sequence[int]]) -> PackedIds:
    """Return the ids of several texts in one buffer."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat = [token for row in rows for token in row]
    return PackedIds(ids=np.array(flat, dtype=np.int32), offsets=offsets)

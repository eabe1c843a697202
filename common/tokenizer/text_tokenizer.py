"""Bases of tokenizers: encoding with marks, and tokenizers whose ids stand for text instead of
bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from common.tokenizer.base import Framing, Ids, PackedIds, TextStream, TokenIds
from common.tokenizer.checks import refuse_surrogate
from common.tokenizer.marks import Marks, encode_around


class MarkedTokenizer(ABC):
    """Tokenizer of a vocabulary and of marks. It can be shared between threads."""

    def __init__(
        self,
        *,
        kind: str,
        backend: str,
        sha256: str,
        marks: Marks,
        framing: Framing,
        unknown_id: int | None = None,
    ) -> None:
        self.kind = kind
        self.backend = backend
        self.sha256 = sha256
        self.marks = marks
        self.vocab_size = marks.size
        self.framing = framing
        self.eod_id = framing.suffix[-1]
        self.ends = marks.ends or (self.eod_id,)
        self.bos_id = marks.bos_id
        self.pad_id = marks.pad_id
        self.unknown_id = unknown_id
        self._ids = marks.added
        self._patterns = {special: marks.pattern(special=special) for special in (True, False)}

    @property
    def special(self) -> dict[str, int]:
        return self.marks.special

    @property
    def added(self) -> dict[str, int]:
        return self.marks.added

    @property
    def has_marks(self) -> bool:
        beyond = self.special.keys() - self.marks.implied
        return self.framing.newline is not None or any(
            self._ids[text] != self.eod_id for text in beyond
        )

    @abstractmethod
    def _encode_many(self, texts: list[str]) -> PackedIds:
        """Encode ordinary text. Raises TypeError or UnicodeError for a lone surrogate."""

    def _encode_marked(self, texts: list[str], allow_special: bool) -> PackedIds:
        pattern = self._patterns[allow_special]
        if pattern is None:
            return self._encode_many(texts)
        return encode_around(
            pattern, lambda match: self._ids[match[match.lastindex or 0]], self._encode_many, texts
        )

    def encode(self, text: str, allow_special: bool = False) -> Ids:
        """Return the ids of ``text``, int32 (n,).

        Special tokens in the text are ordinary text, unless ``allow_special``; added words are
        tokens. Raises TokenizerError for a lone surrogate, with its position.
        """
        return self._encode_strings([text], allow_special).ids

    def encode_packed(self, texts: Sequence[str], allow_special: bool = False) -> PackedIds:
        """Encode like ``encode``, into one buffer with offsets. Raises TokenizerError for a lone
        surrogate, with the text and the position.
        """
        return self._encode_strings(list(texts), allow_special)

    def _encode_strings(self, texts: list[str], allow_special: bool) -> PackedIds:
        try:
            return self._encode_marked(texts, allow_special)
        except (TypeError, UnicodeError) as error:
            refuse_surrogate(texts, error)

    @abstractmethod
    def decode(self, ids: TokenIds) -> str:
        """Return the text of ``ids``. Raises TokenizerError for an id outside the vocabulary."""

    @abstractmethod
    def decode_bytes(self, ids: TokenIds) -> bytes:
        """Return the bytes of ``ids``. Raises TokenizerError like ``decode``."""

    @abstractmethod
    def stream(self, after: Sequence[int] = ()) -> TextStream: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id. Raises TokenizerError for an id outside the vocabulary."""
        return self.decode_bytes([token_id])


class TextTokenizer(MarkedTokenizer):
    """Tokenizer of a single file. Pickling stores its name, so a worker process builds its own."""

    def __init__(self, file: Path, **settings: Any) -> None:
        """settings: those of ``MarkedTokenizer``."""
        super().__init__(**settings)
        self.file = file

    @abstractmethod
    def piece(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id."""

    def decode_bytes(self, ids: TokenIds) -> bytes:
        return self.decode(ids).encode()

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

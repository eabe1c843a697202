"""Text in, int32 ids out: the base of all tokenizers, the framing of documents and prompts, and the
decoding of ids as they arrive.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.errors import TokenizerError
from common.tokenizer.base import Framing, Ids, PackedIds, TextStream, TokenIds
from common.tokenizer.marks import Marks, encode_around

CONTEXT = 16
"""Earlier ids that are decoded again with new ones."""


def checked_ids(ids: TokenIds, vocab_size: int) -> list[int]:
    """Return ids to decode as a list.

    Raises TokenizerError for an id outside 0 .. vocab_size - 1, with its position.
    """
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if array.size == 0:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenizerError(
            f"decode: found shape {array.shape} of {array.dtype}; expected a flat sequence of integer ids"
        )
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise TokenizerError(
            f"decode: id {array[at]} at position {at} is outside 0..{vocab_size - 1}; were"
            " these ids made by another tokenizer, or drawn from the padded part of the"
            " vocabulary?"
        )
    found: list[int] = array.tolist()
    return found


class Tokenizer(ABC):
    """Tokenizer of a vocabulary and of marks, for preprocessing, evaluation and generation.

    It can be shared between threads. ``encode*`` adds no frame: the builder of documents does
    (``encode_documents`` for line ends).
    kind: key in ``TOKENIZERS``, written into the header of a dataset. backend: library that
    encodes. sha256: digest of the vocabulary's content: equal digests give equal ids. special,
    added: ids by text of the special tokens; of all tokens that are whole texts, added words too.
    unknown_id: id for text that the vocabulary lacks, which is never generated; None if all text has ids.
    """

    vocab_size: int
    """Number of ids up to the last added one, before any padding of the embedding."""
    eod_id: int
    """The id that ends a document."""
    ends: tuple[int, ...]
    """The ids at which a continuation stops: those of the model's generation_config.json, else of
    its config.json, else ``eod_id``.
    """
    bos_id: int | None
    """The id that begins a text, if a file names one."""
    pad_id: int | None
    """The id that fills rows, if a file names one."""

    def __init__(
        self,
        file: Path,
        *,
        kind: str,
        backend: str,
        sha256: str,
        marks: Marks,
        framing: Framing,
        unknown_id: int | None = None,
    ) -> None:
        """file: the vocabulary. The others: see the class."""
        self.file = file
        self.kind = kind
        self.backend = backend
        self.sha256 = sha256
        self.special, self.added = marks.special, marks.added
        self.vocab_size = marks.size
        self.framing = framing
        self.eod_id = framing.suffix[-1]
        self.ends = marks.ends or (self.eod_id,)
        self.bos_id = marks.bos_id
        self.pad_id = marks.pad_id
        self.unknown_id = unknown_id
        self._patterns = {special: marks.pattern(special=special) for special in (True, False)}
        beyond = self.special.keys() - marks.implied
        self.has_marks = framing.newline is not None or any(self.added[text] != self.eod_id for text in beyond)
        """Whether documents are expected to hold special tokens: some mark more than the ends and
        the filling of a text.
        """

    @abstractmethod
    def _encode_many(self, texts: list[str]) -> PackedIds:
        """Encode ordinary text. Raises TypeError or UnicodeError for a lone surrogate."""

    def _encode_marked(self, texts: list[str], allow_special: bool) -> PackedIds:
        pattern = self._patterns[allow_special]
        if pattern is None:
            return self._encode_many(texts)
        return encode_around(pattern, lambda match: self.added[match[match.lastindex or 0]], self._encode_many, texts)

    def encode(self, text: str, allow_special: bool = False) -> Ids:
        """Return the ids of ``text``, int32 (n,).

        Special tokens in the text are ordinary text, unless ``allow_special``; added words are
        tokens. Raises TokenizerError for a lone surrogate, with its position.
        """
        return self.encode_packed([text], allow_special).ids

    def encode_packed(self, texts: Sequence[str], allow_special: bool = False) -> PackedIds:
        """Encode like ``encode``, into one buffer with offsets. Raises TokenizerError for a lone
        surrogate, with the text and the position.
        """
        try:
            return self._encode_marked(list(texts), allow_special)
        except (TypeError, UnicodeError):
            for number, text in enumerate(texts):
                at = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
                if at is None:
                    continue
                name = "the text" if len(texts) == 1 else f"text {number} of the batch"
                line = text.count("\n", 0, at) + 1
                raise TokenizerError(
                    f"{name}, character {at} (line {line}): the surrogate U+{ord(text[at]):04X} is"
                    " half a character and has no UTF-8; read the source with its right encoding, or"
                    " replace it with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
                ) from None
            raise

    @abstractmethod
    def decode(self, ids: TokenIds) -> str:
        """Return the text of ``ids``. Raises TokenizerError for an id outside the vocabulary."""

    def decode_bytes(self, ids: TokenIds) -> bytes:
        """Return the bytes of ``ids``. Raises TokenizerError like ``decode``."""
        return self.decode(ids).encode()

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Return a decoder of ids that follow ``after``, such as those of a prompt.

        A character that ``after`` begins and does not end is part of the new text. This one is for a library that
        decodes only whole sequences: it decodes the last ids with and without the new ones.
        """
        held: list[int] = []
        shown = 0

        def push(ids: Sequence[int], final: bool = False) -> str:
            nonlocal shown
            held.extend(ids)
            first = max(0, shown - CONTEXT)
            text = self.decode(held[first:])
            if text.endswith("\ufffd") and not final:  # a part of a character
                return ""
            before = self.decode(held[first:shown])
            shown = len(held)
            return text[len(before) :]

        for each in after[-CONTEXT:]:  # which may end within a character
            push([each])
        return push


_LINE_END = re.compile("\n")


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool | None = None) -> PackedIds:
    """Return the ids of each text, with the tokenizer's newline mark between its lines.

    special: special tokens in a text are these tokens, else ordinary text; left out, it is the
    tokenizer's ``has_marks``.
    """
    special = tokenizer.has_marks if special is None else special
    mark = tokenizer.framing.newline
    if mark is None:
        return tokenizer.encode_packed(texts, special)
    return encode_around(_LINE_END, lambda _: mark, lambda lines: tokenizer.encode_packed(lines, special), texts)


def encode_words(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids of a text that stands within another. Special tokens in it are tokens."""
    if tokenizer.framing.newline is None:
        return tokenizer.encode(text, allow_special=True)
    return encode_documents(tokenizer, [text], special=True).ids


def encode_prompt(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids of a prompt: those of its words, behind the token that transformers puts
    before every text, if there is one.
    """
    ids, begin = encode_words(tokenizer, text), tokenizer.framing.begin
    return np.concatenate([np.array(begin, np.int32), ids]) if begin else ids


def whole_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids, without a character that they begin and do not end.

    It is what precedes the text of ``tokenizer.stream(ids)``.
    """
    stream = tokenizer.stream()
    return "".join(stream([each]) for each in ids)

"""Interface of all tokenizers: text in, int32 ids out, and the frame of a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
TokenIds = Iterable[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Framing:
    """Ids put around each document of a corpus.

    GPT-2 writes ``<|endoftext|>`` after a document and nothing before it. newline: id for the end
    of a line in a document, if the tokenizer drops line ends as white space; else None. begin: ids
    put before a prompt too, as add_bos_token of transformers asks.
    """

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    newline: int | None = None
    begin: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedIds:
    """The ids of n texts in one buffer. Text i is ``ids[offsets[i]:offsets[i + 1]]``.

    ids: int32 (total,). offsets: int64 (n + 1,), first 0, last total.
    """

    ids: Ids
    offsets: npt.NDArray[np.int64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each text, int64 (n,)."""
        return np.diff(self.offsets)

    def rows(self) -> list[Ids]:
        """Return one view per text.

        A view keeps the whole buffer in memory. Copy the few that must outlive their batch.
        """
        bounds = self.offsets.tolist()
        return [self.ids[start:stop] for start, stop in pairwise(bounds)]


class TextStream(Protocol):
    """Decoder of a growing sequence of ids."""

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """Add ``ids`` and return the new text that later ids cannot change.

        The text never ends within a character. final: nothing follows, so return all text held
        back.
        """


@runtime_checkable
class Tokenizer(Protocol):
    """Tokenizer for preprocessing, evaluation and generation.

    ``encode*`` does not add the frame. The builder of documents adds it (``common.tokenizer.lines``
    for line ends).
    """

    @property
    def kind(self) -> str:
        """Key of this class in ``TOKENIZERS``, written into the header of a dataset."""

    @property
    def backend(self) -> str:
        """Name of the library that encodes."""

    @property
    def vocab_size(self) -> int:
        """Number of ids up to the last added one, before any padding of the embedding."""

    @property
    def eod_id(self) -> int:
        """The id that ends a document."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids at which a continuation stops: those of the model's generation_config.json, else
        of its config.json, else ``eod_id``.
        """

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, if a file names one."""

    @property
    def pad_id(self) -> int | None:
        """The id that fills rows, if a file names one."""

    @property
    def special(self) -> Mapping[str, int]:
        """Ids of special tokens by their text."""

    @property
    def added(self) -> Mapping[str, int]:
        """Ids of the tokens that are whole texts: special tokens and added words."""

    @property
    def has_marks(self) -> bool:
        """Whether documents are expected to hold special tokens: some mark more than the ends and
        the filling of a text.
        """

    @property
    def unknown_id(self) -> int | None:
        """Id for text that the vocabulary lacks, which is never generated. None if all text has
        ids.
        """

    @property
    def framing(self) -> Framing: ...
    @property
    def sha256(self) -> str:
        """Hex digest of the vocabulary's content: equal digests give equal ids."""

    def encode(self, text: str, allow_special: bool = False) -> Ids: ...
    def encode_packed(self, texts: Sequence[str], allow_special: bool = False) -> PackedIds: ...
    def decode(self, ids: TokenIds) -> str: ...
    def decode_bytes(self, ids: TokenIds) -> bytes: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Return a decoder of ids that follow ``after``, such as those of a prompt.

        A character that ``after`` begins and does not end is part of the new text.
        """


class TokenizerLoader(Protocol):
    """Builds a tokenizer from its files; an entry of ``TOKENIZERS``."""

    def __call__(self, vocab_file: Path, merge_file: Path | None, backend: str) -> Tokenizer: ...

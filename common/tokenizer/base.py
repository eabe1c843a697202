"""Ids of texts, the frame of a document, and the decoder of a growing text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

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

    def __call__(self, ids: Sequence[int], final: bool = False) -> str:
        """Add ``ids`` and return the new text that later ids cannot change.

        The text never ends within a character. final: nothing follows, so return all text held back.
        """

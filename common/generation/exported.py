"""Generate with an exported program, independent of the library that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class ExportedModel(Protocol):
    """A program that computes logits. It may have been exported with a cache of keys and values."""

    @property
    def has_cache(self) -> bool: ...
    def forget(self) -> None:
        """Forget the sequences, so that new ones can begin."""

    def reorder(self, rows: list[int]) -> None:
        """Put into row i the sequence that row ``rows[i]`` remembers."""

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Add tokens (B, T) to what is remembered; return logits (B, T, vocab_size).

        mask: (B, all tokens so far), 0 for padding. positions: (B, T).
        """


class ExportedDecoder:
    """Implements ``common.generation.generate.Decoder``. Prompts are padded on the left."""

    def __init__(self, model: ExportedModel, positions: int, rows: int) -> None:
        """positions: number of positions of the model. rows: limit of sequences at once."""
        self.rows = rows
        self._model = model
        self._last = positions - 1

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> NDArray[np.float32]:
        longest = max(map(len, prompts))
        self._ids = np.zeros((len(prompts), longest), np.int64)
        self._mask = np.zeros_like(self._ids)
        for row, prompt in enumerate(prompts):
            self._ids[row, longest - len(prompt) :] = prompt
            self._mask[row, longest - len(prompt) :] = 1
        self._model.forget()
        return self._model.run(self._ids, self._mask, self._positions())[:, -1]

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        new = np.array(tokens, np.int64)[:, None]
        self._mask = np.concatenate([self._mask, np.ones_like(new)], 1)
        self._ids = new if self._model.has_cache else np.concatenate([self._ids, new], 1)
        return self._model.run(self._ids, self._mask, self._positions())[:, -1]

    def reorder(self, parents: Sequence[int]) -> None:
        rows = list(parents)
        if rows == list(range(len(rows))):
            return
        self._mask, self._ids = self._mask[rows], self._ids[rows]
        self._model.reorder(rows)

    def _positions(self) -> NDArray[np.int64]:
        """Return the place of each new token in its own sequence; that of padding is 0."""
        places = (self._mask.cumsum(1) - 1).clip(0, self._last)
        positions: NDArray[np.int64] = places[:, -self._ids.shape[1] :]
        return positions

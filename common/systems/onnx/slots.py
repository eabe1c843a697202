"""Batches of an ONNX graph whose sequences come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.systems.onnx.session import Cache, OnnxModel

_Logits = NDArray[np.float32]


class OnnxSlots:
    """Implements ``common.serving.engine.Slots``. The graph's batch holds the sequences of the last
    step, which end at the same column. The caches of the others are kept beside it.
    """

    takes_prompts = True

    def __init__(self, model: OnnxModel, count: int) -> None:
        """Make empty slots. Raises ConfigError for a graph without a cache."""
        if not model.has_cache:
            raise ConfigError(
                "the graph takes no keys and values, so that each token would cost a pass over the"
                " whole text; export it again with export.cache=true"
            )
        self.count = count
        self._model = model
        self._batch: list[int | None] = []
        """Slot of each row of the batch, None for a row that is free."""
        self._lengths = [0] * count
        self._aside: dict[int, Cache] = {}
        """Keys and values (1, nh, T, hs) of slots outside the batch."""

    def admit(
        self,
        slot: int,
        ids: Sequence[int],
        reuse: int,
        observe: Callable[[int, _Logits], None] | None,
    ) -> _Logits:
        batch, own = self._model.cache, self._cache_of(slot, reuse) if reuse else []
        self._leave(slot)
        self._model.cache = own
        new, mask = np.array([ids[reuse:]], np.int64), np.ones((1, len(ids)), np.int64)
        logits = self._model.run(new, mask, np.arange(reuse, len(ids))[None])[0]
        self._aside[slot], self._lengths[slot] = self._model.cache, len(ids)
        self._model.cache = batch
        if observe is not None:
            observe(reuse, logits)
        last: _Logits = logits[-1]
        return last

    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> _Logits:
        held = [self._lengths[slot] for slot in slots]
        if self._batch != list(slots) or held != list(places):
            self._gather(slots, places)
        longest = max(places)
        columns = np.arange(longest + 1)[None]
        mask = (columns >= longest - np.array(places)[:, None]).astype(np.int64)
        logits = self._model.run(
            np.array(tokens, np.int64)[:, None], mask, np.array(places, np.int64)[:, None]
        )
        for slot, place in zip(slots, places, strict=True):
            self._lengths[slot] = place + 1
        last: _Logits = logits[:, -1]
        return last

    def copy(self, source: int, slot: int, length: int) -> None:
        cache = self._cache_of(source, length)
        self._leave(slot)
        self._aside[slot], self._lengths[slot] = cache, length

    def _leave(self, slot: int) -> None:
        """Take a slot out of the batch. Its row is free afterwards."""
        self._batch = [None if each == slot else each for each in self._batch]

    def _cache_of(self, slot: int, length: int, batch: Cache | None = None) -> Cache:
        """Return copies of the keys and values of a slot's first tokens. batch: the cache of all
        rows.
        """
        if slot not in self._batch:
            return [each[:, :, :length].copy() for each in self._aside[slot]]
        row = self._batch.index(slot)
        return [
            each[row : row + 1, :, each.shape[2] - self._lengths[slot] :][:, :, :length].copy()
            for each in batch or self._model.cache
        ]

    def _gather(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Make a batch of these slots, and keep the others beside it."""
        batch = self._model.cache
        for slot in self._batch:
            if slot is not None:
                self._aside[slot] = self._cache_of(slot, self._lengths[slot], batch)
        self._batch = []
        parts = [self._cache_of(slot, length) for slot, length in zip(slots, lengths, strict=True)]
        longest = max(lengths)
        cache = []
        for arrays in zip(*parts, strict=True):
            _, heads, _, size = arrays[0].shape
            whole = np.zeros((len(slots), heads, longest, size), np.float32)
            for row, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
                whole[row, :, longest - length :] = array[0]
            cache.append(whole)
        self._model.cache, self._batch = cache, list(slots)
        for slot in slots:
            del self._aside[slot]

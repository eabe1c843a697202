"""Sequences that come and go in the rows of one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mindspore import Tensor, ops

from common.generation.sampling import Logits
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.model import GPT2


class Slots:
    """Implementation of ``common.serving.engine.Slots`` with one graph, which takes a token of each
    row.

    A prompt is processed step by step, beside the tokens of other rows. A pass over the whole
    prompt would be another graph for each length. A row that is not requested takes its last token
    again at the same position, which changes nothing.
    """

    takes_prompts = False

    def __init__(self, model: GPT2, device: MindSporeDevice, count: int) -> None:
        self.count = count
        self._decode = device.compile(model.decode)
        self._keys, self._values = model.new_caches(count, model.config.max_positions)
        self._tokens, self._places = np.zeros((count, 1), np.int32), np.zeros(count, np.int32)

    def admit(
        self,
        slot: int,
        ids: Sequence[int],
        reuse: int,
        observe: Callable[[int, Logits], None] | None,
    ) -> Logits:
        raise NotImplementedError("prompts go in by steps")

    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> Logits:
        rows = list(slots)
        self._tokens[rows, 0], self._places[rows] = tokens, places
        logits, self._keys, self._values = self._decode(
            Tensor(self._tokens), Tensor(self._places), self._keys, self._values
        )
        result: Logits = logits.asnumpy()[rows]
        return result

    def copy(self, source: int, slot: int, length: int) -> None:
        rows = np.arange(self.count, dtype=np.int32)
        rows[slot] = source
        self._keys, self._values = (
            ops.gather(cache, Tensor(rows), 1) for cache in (self._keys, self._values)
        )
        self._tokens[slot], self._places[slot] = self._tokens[source], self._places[source]

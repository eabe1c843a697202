"""Sequences that come and go in the rows of one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from common.generation.sampling import Logits
from torch_gpt2.device import TorchDevice, attention_mask
from torch_gpt2.int8 import head_product
from torch_gpt2.loss import ROWS_AT_ONCE
from torch_gpt2.model import GPT2
from torch_gpt2.predict import Layer


class Slots:
    """Implementation of ``common.serving.engine.Slots``.

    Each row writes at its own column, and a mask hides later columns from it. A step computes all
    rows from the first to the last requested one. Rows in between write into an extra column, which
    nothing reads.
    """

    takes_prompts = True

    def __init__(self, model: GPT2, device: TorchDevice, count: int) -> None:
        self.count = count
        self._model = model.eval()
        self._device = device.torch_device
        config, dtype = model.config, model.compute_dtype
        self._layers = [Layer(block, dtype, count) for block in model.h]  # type: ignore[arg-type]
        self._head = head_product(model, count)
        self._unread = config.max_positions
        shape = (
            count,
            config.num_heads,
            config.max_positions + 1,
            config.hidden_size // config.num_heads,
        )
        for layer in self._layers:
            layer.keys, layer.values = (
                torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(2)
            )

    @torch.inference_mode()
    def admit(
        self,
        slot: int,
        ids: Sequence[int],
        reuse: int,
        observe: Callable[[int, Logits], None] | None,
    ) -> Logits:
        end, rows = len(ids), slice(slot, slot + 1)
        places = torch.arange(reuse, end, device=self._device)
        x = self._model.embed(torch.tensor(ids[reuse:], device=self._device)[None], places)
        mask = None
        if reuse:
            seen = torch.arange(end, device=self._device)[None] <= places[:, None]
            mask = attention_mask(seen, x.dtype)
        for layer in self._layers:
            q, k, v = layer.heads(x)
            layer.keys[rows, :, reuse:end], layer.values[rows, :, reuse:end] = k, v
            x = layer.finish(x, q, layer.keys[rows, :, :end], layer.values[rows, :, :end], mask)
        if observe is not None:
            for first in range(0, end - reuse, ROWS_AT_ONCE):
                observe(reuse + first, self._logits(x[0, first : first + ROWS_AT_ONCE]))
        logits: Logits = self._logits(x[0, -1:])[0]
        return logits

    @torch.inference_mode()
    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> Logits:
        first, last = min(slots), max(slots)
        span, end = slice(first, last + 1), max(places) + 1
        rows = torch.tensor(slots) - first
        at = torch.zeros(last + 1 - first, dtype=torch.long)
        at[rows] = torch.tensor(places)
        ids, column = torch.zeros_like(at), torch.full_like(at, self._unread)
        ids[rows], column[rows] = torch.tensor(tokens), at[rows]
        seen = torch.arange(end)[None] <= at[:, None]
        mask = None
        if not seen.all():
            mask = attention_mask(seen.to(self._device), self._model.compute_dtype)[:, None, None]
        every = torch.arange(first, last + 1, device=self._device)
        column = column.to(self._device)
        x = self._model.embed(ids.to(self._device)[:, None], at.to(self._device)[:, None])
        for layer in self._layers:
            q, k, v = layer.heads(x)
            layer.keys[every, :, column], layer.values[every, :, column] = k[:, :, 0], v[:, :, 0]
            x = layer.finish(x, q, layer.keys[span, :, :end], layer.values[span, :, :end], mask)
        return self._logits(x[rows.to(self._device), -1])

    @torch.inference_mode()
    def copy(self, source: int, slot: int, length: int) -> None:
        for layer in self._layers:
            for cache in (layer.keys, layer.values):
                cache[slot, :, :length] = cache[source, :, :length]

    def _logits(self, x: Tensor) -> Logits:
        logits: Logits = self._head(self._model.ln_f(x)).float().cpu().numpy()
        return np.ascontiguousarray(logits)

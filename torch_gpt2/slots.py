"""Sequences that come and go in the rows of one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from common.generation.sampling import Logits
from torch_gpt2.decode_step import DecodeStep, Layers
from torch_gpt2.device import TorchDevice, attention_mask
from torch_gpt2.loss import ROWS_AT_ONCE
from torch_gpt2.model import GPT2


class Slots:
    """Implementation of ``common.serving.engine.Slots``.

    Each row writes at its own column, and a mask hides later columns from it. A step computes all
    rows from the first to the last requested one. Rows in between write into an extra column, which
    nothing reads.
    """

    takes_prompts = True

    def __init__(self, model: GPT2, device: TorchDevice, count: int) -> None:
        self.count = count
        self._layers = Layers(model, device, count)
        self._device = device
        self._step = DecodeStep(self._layers, count)
        self._fixed = device.runs_ahead

    @torch.inference_mode()
    def admit(
        self,
        slot: int,
        ids: Sequence[int],
        reuse: int,
        observe: Callable[[int, Logits], None] | None,
    ) -> Logits:
        end, rows = len(ids), slice(slot, slot + 1)
        places = torch.arange(reuse, end, device=self._device.torch_device)
        x = self._layers.embed(self._device.send(torch.tensor(ids[reuse:]))[None], places)
        mask = None
        if reuse:
            seen = torch.arange(end, device=x.device)[None] <= places[:, None]
            mask = attention_mask(seen, x.dtype)
        for layer in self._layers.blocks:
            q, k, v = layer.heads(x)
            layer.keys[rows, :, reuse:end], layer.values[rows, :, reuse:end] = k, v
            if self._fixed:  # a step multiplies later columns by 0, which leaves a NaN of a text
                layer.keys[rows, :, end:] = layer.values[rows, :, end:] = 0
            x = layer.finish(x, q, layer.keys[rows, :, :end], layer.values[rows, :, :end], mask)
        if observe is not None:
            for first in range(0, end - reuse, ROWS_AT_ONCE):
                observe(reuse + first, self._layers.read_logits(x[0, first : first + ROWS_AT_ONCE]))
        logits: Logits = self._layers.read_logits(x[0, -1:])[0]
        return logits

    @torch.inference_mode()
    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> Logits:
        if self._fixed:
            return self._step(slots, tokens, places)
        first, last, end = min(slots), max(slots), max(places) + 1
        rows = torch.tensor(slots) - first
        inputs = torch.zeros(2, last + 1 - first, dtype=torch.long)
        inputs[1] = self._layers.unread
        inputs[:, rows] = torch.tensor([tokens, places])
        masked = len(rows) <= last - first or min(places) + 1 < end
        x = self._layers.hidden(inputs, end, first=first, masked=masked)
        return self._layers.read_logits(x[rows, -1])

    @torch.inference_mode()
    def copy(self, source: int, slot: int, length: int) -> None:
        for layer in self._layers.blocks:
            for cache in (layer.keys, layer.values):
                cache[slot, :, :length] = cache[source, :, :length]

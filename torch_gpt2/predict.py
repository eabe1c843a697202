"""Continue prompts, serve, score text and compute logits, with a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.conversion.logits import config_of
from common.generation.sampling import Logits
from common.inference.runner import Runner
from common.parallel.run import Run
from common.training.opened_checkpoint import Checkpoint
from common.training.start import weights_to_use
from torch_gpt2.checkpoint import fill_weights
from torch_gpt2.decode_step import DecodeStep, Layers
from torch_gpt2.device import TorchDevice, attention_mask, select_device
from torch_gpt2.evaluate import make_scorer
from torch_gpt2.int8 import load_model
from torch_gpt2.loss import ROWS_AT_ONCE
from torch_gpt2.model import GPT2, build_model


def open_runner(config: Run, device: TorchDevice, checkpoint: Checkpoint, tokenizer: dict[str, Any]) -> Runner:
    """Load the weights of a checkpoint onto a device.

    tokenizer: record of the tokenizer to be used. Raises CheckpointError unless it and the model fit.
    """
    weights_to_use(config, checkpoint, tokenizer)
    model = load_model(config, device, checkpoint)
    return Runner(
        decoder=partial(Decoder, model, device),
        scorer=partial(make_scorer, model, device),
        slots=partial(Slots, model, device),
    )


class Decoder:
    """Implementation of ``common.generation.generate.Decoder``.

    Sequences begin at the same column of the caches. A mask hides from a row the columns behind its own.
    """

    def __init__(self, model: GPT2, device: TorchDevice, rows: int) -> None:
        self.rows = rows
        self._layers = Layers(model, device)
        self._device = device
        self._step = DecodeStep(self._layers, rows) if device.runs_ahead else None

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Logits:
        rows, self._lengths = len(prompts), [len(prompt) for prompt in prompts]
        longest = max(self._lengths)
        if room and not self._step:
            self._layers.allocate(rows, longest + room)
        for layer in self._layers.blocks if room and self._step else ():
            layer.keys.zero_()  # a step multiplies later columns by 0, which leaves a NaN of a text
            layer.values.zero_()
        # Prompts are padded on the right, where a causal mask hides the padding from all tokens that count.
        ids = torch.zeros(rows, longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        x = self._layers.embed(self._device.send(ids), torch.arange(longest, device=self._device.torch_device))
        for layer in self._layers.blocks:
            q, k, v = layer.heads(x)
            if room:
                layer.keys[:rows, :, :longest], layer.values[:rows, :, :longest] = k, v
            x = layer.finish(x, q, k, v, None)
        last = self._device.send(torch.tensor(self._lengths) - 1)
        return self._layers.read_logits(x[torch.arange(rows, device=x.device), last])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        lengths, self._lengths = self._lengths, [length + 1 for length in self._lengths]
        return (self._step or self._layers.step)(range(len(tokens)), tokens, lengths)

    @torch.inference_mode()
    def reorder(self, parents: Sequence[int]) -> None:
        if list(parents) == list(range(len(parents))):
            return
        rows = self._device.send(torch.tensor(parents))
        for layer in self._layers.blocks:
            if self._step is None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            else:  # which stay in their place
                layer.keys[: len(rows)], layer.values[: len(rows)] = (layer.keys[rows], layer.values[rows])
        self._lengths = [self._lengths[parent] for parent in parents]


class Slots:
    """Implementation of ``common.serving.engine.Slots``.

    Each row writes at its own column, and a mask hides later columns from it.
    """

    takes_prompts = True

    def __init__(self, model: GPT2, device: TorchDevice, count: int) -> None:
        self.count = count
        self._layers = Layers(model, device)
        self._device = device
        self._step = DecodeStep(self._layers, count)
        self._fixed = device.runs_ahead

    @torch.inference_mode()
    def admit(self, slot: int, ids: Sequence[int], reuse: int, observe: Callable[[int, Logits], None] | None) -> Logits:
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
        return (self._step if self._fixed else self._layers.step)(slots, tokens, places)

    @torch.inference_mode()
    def copy(self, source: int, slot: int, length: int) -> None:
        for layer in self._layers.blocks:
            for cache in (layer.keys, layer.values):
                cache[slot, :, :length] = cache[source, :, :length]


@torch.no_grad()
def logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of a checkpoint folder in our own format."""
    net = build_model(config_of(model, folder), select_device("cpu")).eval()
    fill_weights(dict(net.named_parameters()), Checkpoint(folder).weights(model))
    found: NDArray[np.float32] = net.logits(net(torch.from_numpy(ids))).numpy()
    return found


@torch.no_grad()
def hugging_face_logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of a folder in the format of transformers, computed by transformers."""
    for name in ("torchao", "torch.utils._pytree"):  # warnings of a torchao for another torch
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    net: Any = GPT2LMHeadModel.from_pretrained(folder if folder.is_dir() else folder.parent, local_files_only=True)
    net = net.float().eval()
    found: NDArray[np.float32] = net(torch.from_numpy(ids)).logits.numpy()
    return found

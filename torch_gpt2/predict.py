"""Continue prompts, and score text, with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.cluster.environment import ALONE, Process
from common.evaluation import Scorer
from common.generation.sampling import Logits
from common.inference.run_modes import continue_prompts
from common.inputs import Inputs
from common.parallel.run import Run
from common.training.opened_checkpoint import Checkpoint
from common.training.start import weights_to_use
from torch_gpt2.decode_step import DecodeStep, Layers
from torch_gpt2.device import TorchDevice, attention_mask
from torch_gpt2.evaluate import make_scorer
from torch_gpt2.int8 import load_model
from torch_gpt2.model import GPT2


def predict(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    assert inputs.checkpoint is not None and inputs.tokenizer is not None
    device, checkpoint = inputs.device, inputs.checkpoint
    continue_prompts(
        config, inputs.tokenizer, lambda run, record: open_runner(run, device, checkpoint, record)
    )


def open_runner(
    config: Run, device: TorchDevice, checkpoint: Checkpoint, tokenizer: dict[str, Any]
) -> Runner:
    """Load the weights of a checkpoint onto a device.

    tokenizer: record of the tokenizer to be used. Raises CheckpointError unless it and the model
    fit.
    """
    weights_to_use(config, checkpoint, tokenizer)
    return Runner(load_model(config, device, checkpoint), device)


class Runner:
    """Implementation of ``common.inference.runner.Runner``."""

    has_fixed_shapes = False

    def __init__(self, model: GPT2, device: TorchDevice) -> None:
        self.model = model
        self.device = device

    def decoder(self, rows: int) -> Decoder:
        return Decoder(self.model, self.device, rows)

    def scorer(self) -> Scorer:
        return make_scorer(self.model, self.device)


class Decoder:
    """Implementation of ``common.generation.generate.Decoder``.

    On a CPU sequences end at the same column of the caches. Sequences of shorter prompts begin
    later, and a mask hides the columns before. So a step writes one column, and prompts of equal
    length need no mask. On an accelerator they begin at the same column, as ``DecodeStep`` has it.
    """

    def __init__(self, model: GPT2, device: TorchDevice, rows: int) -> None:
        self.rows = rows
        self._layers = Layers(model, device, rows)
        self._device = device
        self._step = DecodeStep(self._layers, rows) if device.runs_ahead else None

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Logits:
        self._lengths = [len(prompt) for prompt in prompts]
        longest = max(self._lengths)
        begins = [0 if self._step else longest - length for length in self._lengths]
        self._column = 0
        if room and not self._step:
            self._layers.allocate(len(prompts), longest + room)
        for layer in self._layers.blocks if room and self._step else ():
            layer.keys.zero_()  # a step multiplies later columns by 0, which leaves a NaN of a text
            layer.values.zero_()
        self._mask = None
        if any(begins):
            seen = torch.arange(longest + room)[None] >= torch.tensor(begins)[:, None]
            mask = attention_mask(self._device.send(seen), self._layers.dtype)
            self._mask = mask[:, None, None]  # (B, 1, 1, K)
        # Prompts are padded on the right, where a causal mask hides the padding from all tokens
        # that count.
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        x = self._forward(
            self._device.send(ids),
            torch.arange(longest, device=self._device.torch_device),
            keep=begins if room else (),
        )
        every = torch.arange(len(prompts), device=x.device)
        last = self._device.send(torch.tensor(self._lengths) - 1)
        return self._layers.read_logits(x[every, last])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Logits:
        lengths, self._lengths = self._lengths, [length + 1 for length in self._lengths]
        if self._step is not None:
            return self._step(range(len(tokens)), tokens, lengths)
        positions = [[min(length, self._layers.unread - 1)] for length in lengths]
        x = self._forward(torch.tensor(tokens)[:, None], torch.tensor(positions))
        return self._layers.read_logits(x[:, -1])

    @torch.inference_mode()
    def reorder(self, parents: Sequence[int]) -> None:
        if list(parents) == list(range(len(parents))):
            return
        rows = self._device.send(torch.tensor(parents))
        for layer in self._layers.blocks:
            if self._step is None:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            else:  # which stay in their place
                layer.keys[: len(rows)], layer.values[: len(rows)] = (
                    layer.keys[rows],
                    layer.values[rows],
                )
        self._lengths = [self._lengths[parent] for parent in parents]
        self._mask = None if self._mask is None else self._mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor, keep: Sequence[int] = ()) -> Tensor:
        """Return hidden states (B, T, C) before the last layer norm. The caches grow by T
        columns.

        keep: columns from which they take prompts; empty where nothing comes after them.
        """
        x = self._layers.embed(ids, positions)
        end = self._column + ids.shape[1]
        mask = self._mask[..., :end] if self._column and self._mask is not None else None
        for layer in self._layers.blocks:
            q, k, v = layer.heads(x)
            if self._column:
                k, v = layer.remember(k, v, self._column)
            for row, begin in enumerate(keep):
                layer.keys[row, :, begin:end] = k[row, :, : end - begin]
                layer.values[row, :, begin:end] = v[row, :, : end - begin]
            x = layer.finish(x, q, k, v, mask)
        self._column = end
        return x

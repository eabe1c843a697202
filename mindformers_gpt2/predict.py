"""Continue prompts, and score text, with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from common.cluster.environment import ALONE, Process
from common.evaluation import Scorer
from common.generation.sampling import Logits
from common.inference.run_modes import continue_prompts
from common.inputs import Inputs
from common.parallel.run import Run
from common.training.opened_checkpoint import Checkpoint
from common.training.start import weights_to_use
from mindformers_gpt2.checkpoint import load_weights
from mindformers_gpt2.device import MindSporeDevice
from mindformers_gpt2.evaluate import make_scorer
from mindformers_gpt2.model import GPT2, build_model


def predict(config: Run, inputs: Inputs, process: Process = ALONE) -> None:
    assert inputs.checkpoint is not None and inputs.tokenizer is not None
    device, checkpoint = inputs.device, inputs.checkpoint
    continue_prompts(
        config, inputs.tokenizer, lambda run, record: open_runner(run, device, checkpoint, record)
    )


def open_runner(
    config: Run, device: MindSporeDevice, checkpoint: Checkpoint, tokenizer: dict[str, Any]
) -> Runner:
    """Load the weights of a checkpoint onto a device.

    tokenizer: record of the tokenizer to be used. Raises CheckpointError unless it and the model
    fit.
    """
    weights_to_use(config, checkpoint, tokenizer)
    model = build_model(config, device)
    load_weights(
        {parameter.name: parameter for parameter in model.get_parameters()},
        config.model,
        checkpoint,
    )
    return Runner(model, device)


class Runner:
    """Implementation of ``common.inference.runner.Runner``."""

    has_fixed_shapes = True

    def __init__(self, model: GPT2, device: MindSporeDevice) -> None:
        self.model = model
        self.device = device

    def decoder(self, rows: int) -> Decoder:
        return Decoder(self.model, self.device, rows)

    def scorer(self) -> Scorer:
        return make_scorer(self.model, self.device)


class Decoder:
    """Implementation of ``common.generation.generate.Decoder`` with two graphs of fixed shape.

    One graph takes one token of each of ``rows`` rows. The other takes whole prompts to which
    nothing is added. Each graph is compiled once. So all other prompts go through the first graph
    token by token, and unused rows hold token 0.
    """

    def __init__(self, model: GPT2, device: MindSporeDevice, rows: int) -> None:
        self.rows = rows
        self._model = model
        self._decode = device.compile(model.decode)
        self._follow = device.compile(_Following(model))
        self._last = model.config.max_positions - 1
        self._width = 0

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Logits:
        if room == 0:
            return self._after(prompts)
        self._keys, self._values = self._new_caches()
        last = np.array([len(prompt) - 1 for prompt in prompts])
        # A row at the end of its prompt takes its last token again at the same position, which
        # changes nothing.
        for column in range(last.max() + 1):
            self._positions = np.minimum(last, column)
            logits = self._add(
                [prompt[place] for prompt, place in zip(prompts, self._positions, strict=True)]
            )
        return logits

    def step(self, tokens: Sequence[int]) -> Logits:
        self._positions = np.minimum(self._positions + 1, self._last)
        return self._add(tokens)

    def reorder(self, parents: Sequence[int]) -> None:
        if list(parents) == list(range(len(parents))):
            return
        rows = np.arange(self.rows, dtype=np.int32)
        rows[: len(parents)] = parents
        self._keys, self._values = (
            ops.gather(cache, Tensor(rows), 1) for cache in (self._keys, self._values)
        )
        self._positions = self._positions[list(parents)]

    def _new_caches(self) -> tuple[Tensor, Tensor]:
        return self._model.new_caches(self.rows, self._last + 1)

    def _after(self, prompts: Sequence[Sequence[int]]) -> Logits:
        """Return logits (B, vocab_size) after whole prompts."""
        self._width = max(self._width, *map(len, prompts))  # another shape needs a compilation
        ids, last = np.zeros((self.rows, self._width), np.int32), np.zeros(self.rows, np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)], last[row] = prompt, row * self._width + len(prompt) - 1
        result: Logits = self._follow(Tensor(ids), Tensor(last)).asnumpy()[: len(prompts)]
        return result

    def _add(self, tokens: Sequence[int]) -> Logits:
        """Return logits (B, vocab_size) after ``tokens`` at their rows' positions."""
        token, position = np.zeros((self.rows, 1), np.int32), np.zeros(self.rows, np.int32)
        token[: len(tokens), 0], position[: len(tokens)] = tokens, self._positions
        logits, self._keys, self._values = self._decode(
            Tensor(token), Tensor(position), self._keys, self._values
        )
        result: Logits = logits.asnumpy()[: len(tokens)]
        return result


class _Following(nn.Cell):
    """Map token ids (B, T) and places (B,) to logits (B, vocab_size) of the following tokens.

    places: index of each row's last token among all B T.
    """

    def __init__(self, model: GPT2) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, ids: Tensor, last: Tensor) -> Tensor:
        hidden = self.model.construct(ids)
        return self.model.logits(ops.Gather()(hidden.reshape((-1, hidden.shape[-1])), last, 0))

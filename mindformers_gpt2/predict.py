"""Continue prompts, serve, score text and compute logits, with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.conversion.logits import config_of
from common.generation.sampling import Logits
from common.inference.runner import Runner
from common.parallel.run import Run
from common.training.opened_checkpoint import Checkpoint
from common.training.start import weights_to_use
from mindformers_gpt2.checkpoint import load_model
from mindformers_gpt2.device import MindSporeDevice, select_device
from mindformers_gpt2.evaluate import make_scorer
from mindformers_gpt2.model import GPT2, new_caches


def open_runner(config: Run, device: MindSporeDevice, checkpoint: Checkpoint, tokenizer: dict[str, Any]) -> Runner:
    """Load the weights of a checkpoint onto a device.

    tokenizer: record of the tokenizer to be used. Raises CheckpointError unless it and the model fit.
    """
    weights_to_use(config, checkpoint, tokenizer)
    model = load_model(config, device, checkpoint)
    return Runner(
        decoder=partial(make_decoder, model, device),
        scorer=partial(make_scorer, model, device),
        slots=partial(make_slots, model, device),
        has_fixed_shapes=True,
    )


class Decoder:
    """Implementation of ``common.generation.generate.Decoder`` with two graphs of fixed shape.

    One graph takes one token of each of ``rows`` rows. The other takes whole prompts to which
    nothing is added. Each graph is compiled once. So all other prompts go through the first graph
    token by token, and unused rows hold token 0.
    """

    def __init__(
        self, decode: Callable[..., Any], follow: Callable[..., Any], model: ResolvedModel, dtype: ms.Type, rows: int
    ) -> None:
        """Create a decoder. decode: as ``GPT2.decode``. follow: as ``_Following``. dtype: of the caches."""
        self.rows = rows
        self._follow = follow
        self._new_slots = partial(Slots, decode, model, dtype, rows)
        self._last = model.max_positions - 1
        self._width = 0

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Logits:
        if room == 0:
            self._width = max(self._width, *map(len, prompts))  # another shape needs a compilation
            ids, ends = np.zeros((self.rows, self._width), np.int32), np.zeros(self.rows, np.int32)
            for row, prompt in enumerate(prompts):
                ids[row, : len(prompt)], ends[row] = prompt, row * self._width + len(prompt) - 1
            result: Logits = self._follow(Tensor(ids), Tensor(ends)).asnumpy()[: len(prompts)]
            return result
        self._slots = self._new_slots()
        last = np.array([len(prompt) - 1 for prompt in prompts])
        # A row at the end of its prompt takes its last token again at the same position, which changes nothing.
        for column in range(last.max() + 1):
            self._positions = np.minimum(last, column)
            tokens = [prompt[place] for prompt, place in zip(prompts, self._positions, strict=True)]
            logits = self._slots.step(range(len(tokens)), tokens, self._positions.tolist())
        return logits

    def step(self, tokens: Sequence[int]) -> Logits:
        self._positions = np.minimum(self._positions + 1, self._last)
        return self._slots.step(range(len(tokens)), tokens, self._positions.tolist())

    def reorder(self, parents: list[int]) -> None:
        self._slots.gather(range(len(parents)), parents)
        self._positions = self._positions[parents]


def make_decoder(model: GPT2, device: MindSporeDevice, rows: int) -> Decoder:
    graphs = device.compile(model.decode), device.compile(_Following(model))
    return Decoder(*graphs, model.config, model.compute_dtype, rows)


def make_slots(model: GPT2, device: MindSporeDevice, count: int) -> Slots:
    return Slots(device.compile(model.decode), model.config, model.compute_dtype, count)


class Slots:
    """Implementation of ``common.serving.engine.Slots`` with one graph, which takes a token of each row.

    A prompt is processed step by step, beside the tokens of other rows. A pass over the whole prompt would be another
    graph for each length. A row that is not requested takes its last token again at the same position, which changes
    nothing.
    """

    admit = None

    def __init__(self, decode: Callable[..., Any], model: ResolvedModel, dtype: ms.Type, count: int) -> None:
        """Create slots. decode: as ``GPT2.decode``. dtype: of the caches."""
        self.count = count
        self._decode = decode
        self._keys, self._values = new_caches(model, count, dtype)
        self._tokens, self._places = np.zeros((count, 1), np.int32), np.zeros(count, np.int32)

    def step(self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]) -> Logits:
        rows = list(slots)
        self._tokens[rows, 0], self._places[rows] = tokens, places
        logits, self._keys, self._values = self._decode(
            Tensor(self._tokens), Tensor(self._places), self._keys, self._values
        )
        result: Logits = logits.asnumpy()[rows]
        return result

    def copy(self, source: int, slot: int, length: int) -> None:
        self.gather([slot], [source])

    def gather(self, slots: Sequence[int], sources: Sequence[int]) -> None:
        """Let each of these slots hold the text of another one, or of its own."""
        rows = np.arange(self.count, dtype=np.int32)
        rows[list(slots)] = sources
        self._keys, self._values = (ops.gather(cache, Tensor(rows), 1) for cache in (self._keys, self._values))
        self._tokens, self._places = self._tokens[rows], self._places[rows]


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


def logits(folder: Path, model: ResolvedModel, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of a checkpoint folder in our own format."""
    net = load_model(config_of(model, folder), select_device("cpu"), Checkpoint(folder))
    hidden = net(ms.Tensor(ids.astype(np.int32)))
    found: NDArray[np.float32] = net.logits(hidden.reshape((-1, model.hidden_size))).asnumpy()
    return found.reshape(*ids.shape, model.vocab_size)

"""Interface of backends and exported programs to generation and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.evaluation.rows import RowBatch, Scorer, Scores
from common.generation.generate import Decoder, ExportedDecoder, ExportedModel
from common.inference.source import Source
from common.parallel.run import Run
from common.serving.engine import Slots
from common.systems.onnx.folder import GRAPH_FILE, OnnxModel, OnnxSlots


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A model in the memory of its framework."""

    decoder: Callable[[int], Decoder]
    """Returns a decoder of up to so many sequences. One decoder works at a time."""
    scorer: Callable[[], Scorer]
    """Returns a function that scores batches of tokens."""
    slots: Callable[[int], Slots] | None = None
    """Returns slots that serve so many sequences at once."""
    has_fixed_shapes: bool = False
    """Whether each new shape of a batch costs a compilation, so that few shapes are better than little padding."""


def program_runner(model: ExportedModel, slots: Callable[[int], Slots] | None = None) -> Runner:
    """Return the runner of a program that computes logits."""
    scorer = partial(score_by_logits, lambda ids: model.run(ids, np.ones_like(ids)))
    return Runner(decoder=partial(ExportedDecoder, model), scorer=scorer, slots=slots)


def open_onnx(source: Source, config: Run) -> Runner:
    """Open an ONNX folder, or the file of a graph. Raises ConfigError."""
    require_cpu(config, "ONNX")
    file = source.path / GRAPH_FILE if source.path.is_dir() else source.path
    model = OnnxModel(file, source.model.max_positions, threads=config.runtime.threads or 0)
    return program_runner(model, partial(OnnxSlots, model))


def require_cpu(config: Run, program: str) -> None:
    """Raise ConfigError if the config asks for another device."""
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"device={config.device}: {program} runs on a CPU here; leave it out")


def score_by_logits(logits: Callable[[NDArray[np.int64]], NDArray[np.float32]]) -> Scorer:
    """Return a scorer that runs one row at a time, because a program returns the logits of all its
    tokens. logits: maps ids (1, T) to (1, T, vocab_size).
    """

    def score(batch: RowBatch) -> Scores:
        width, count = batch.ids.shape[1], len(batch.owners)
        losses, hits = np.zeros(count, np.float32), np.zeros(count, np.bool_)
        for row in np.unique(batch.owners):
            own = np.flatnonzero(batch.owners == row)
            places, targets = batch.places[own] - row * width, batch.targets[own]
            ids = batch.ids[row : row + 1, : places.max() + 1].astype(np.int64)
            found = logits(ids)[0, places]
            largest = found.max(1)
            sums = np.log(np.exp(found - largest[:, None]).sum(1)) + largest
            losses[own] = sums - found[np.arange(len(own)), targets]
            hits[own] = found.argmax(1) == targets
        return Scores(losses=losses, hits=hits)

    return score

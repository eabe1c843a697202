"""Exports that run without conversion, and the runners of programs that compute logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.evaluation import RowBatch, Scorer, TokenScores
from common.generation.exported import ExportedDecoder, ExportedModel
from common.generation.generate import Decoder
from common.inference.source import Source
from common.parallel.run import Run
from common.systems.onnx.folder import GRAPH_FILE, OnnxModel, OnnxSlots


class ProgramRunner:
    """Implements ``common.inference.runner.Runner`` with a program that computes logits."""

    has_fixed_shapes = False

    def __init__(self, model: ExportedModel, positions: int) -> None:
        """positions: number of positions of the model."""
        self._model = model
        self._positions = positions

    def decoder(self, rows: int) -> Decoder:
        return ExportedDecoder(self._model, self._positions, rows)

    def slots(self, count: int) -> OnnxSlots:
        """Return slots that serve ``count`` sequences at once with an ONNX graph.

        Raises ConfigError if the graph keeps no keys and values.
        """
        assert isinstance(self._model, OnnxModel)
        return OnnxSlots(self._model, count)

    def scorer(self) -> Scorer:
        def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
            self._model.forget()
            return self._model.run(ids, np.ones_like(ids), np.arange(ids.shape[1])[None])

        return score_by_logits(logits)


def open_onnx(source: Source, config: Run) -> ProgramRunner:
    """Open an ONNX folder, or the file of a graph. Raises ConfigError."""
    require_cpu(config, "ONNX")
    file = source.path / GRAPH_FILE if source.path.is_dir() else source.path
    model = OnnxModel(file, threads=config.runtime.threads or 0)
    return ProgramRunner(model, source.model.max_positions)


def require_cpu(config: Run, program: str) -> None:
    """Raise ConfigError if the config asks for another device."""
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"device={config.device}: {program} runs on a CPU here; leave it out")


def score_by_logits(logits: Callable[[NDArray[np.int64]], NDArray[np.float32]]) -> Scorer:
    """Return a scorer that runs one row at a time, because a program returns the logits of all its
    tokens. logits: maps ids (1, T) to (1, T, vocab_size).
    """

    def score(batch: RowBatch) -> TokenScores:
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
        return TokenScores(losses=losses, hits=hits)

    return score

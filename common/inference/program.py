"""Runners of exports that need no training framework."""

from __future__ import annotations

import numpy as np

from common.evaluation import RowBatch, Scorer, TokenScores
from common.generation.generate import Decoder
from common.inference.source import Source
from common.parallel.resolved_run import ResolvedRun
from common.systems.onnx.session import OnnxDecoder, OnnxModel
from common.systems.onnx.write import GRAPH_FILE


class OnnxRunner:
    """Implements ``common.inference.runner.Runner`` with onnxruntime on a CPU."""

    has_fixed_shapes = False

    def __init__(self, source: Source, config: ResolvedRun) -> None:
        file = source.path / GRAPH_FILE if source.path.is_dir() else source.path
        self._model = OnnxModel(file, threads=config.runtime.threads or 0)
        self._positions = source.model.max_positions

    def decoder(self, rows: int) -> Decoder:
        return OnnxDecoder(self._model, self._positions, rows)

    def scorer(self) -> Scorer:
        """Score a row at a time, since the graph returns the logits of all its tokens."""

        def score(batch: RowBatch) -> TokenScores:
            width, count = batch.ids.shape[1], len(batch.owners)
            losses, hits = np.zeros(count, np.float32), np.zeros(count, np.bool_)
            for row in np.unique(batch.owners):
                own = np.flatnonzero(batch.owners == row)
                places = batch.places[own] - row * width
                ids = batch.ids[row : row + 1, : places.max() + 1].astype(np.int64)
                positions = np.arange(ids.shape[1])[None]
                self._model.forget()
                logits = self._model.run(ids, np.ones_like(ids), positions)[0, places]
                targets = batch.targets[own]
                largest = logits.max(1)
                sums = np.log(np.exp(logits - largest[:, None]).sum(1)) + largest
                losses[own] = sums - logits[np.arange(len(own)), targets]
                hits[own] = logits.argmax(1) == targets
            return TokenScores(losses=losses, hits=hits)

        return score

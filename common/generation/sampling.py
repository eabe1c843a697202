"""The choice of the next token from logits, in numpy, the same for both backends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.config.schema import PredictConfig

Logits = NDArray[np.float32]
Scores = NDArray[np.float64]


def choose_token(logits: Logits, seen: NDArray[np.int64], settings: PredictConfig, generator: np.random.Generator) -> int:
    """The next token of one sequence.

    logits: (vocab_size,) float32, of the true vocabulary; seen: ids already in the sequence, the prompt's included.
    Order as in transformers: repetition penalty (Keskar et al. 2019), temperature, top-k, top-p (Holtzman et al. 2020), draw.
    """
    scores = logits.astype(np.float64)
    if settings.repetition_penalty != 1.0:
        ids = np.unique(seen)
        penalised = scores[ids]
        scores[ids] = np.where(penalised > 0, penalised / settings.repetition_penalty, penalised * settings.repetition_penalty)
    if settings.strategy == "greedy":
        return int(scores.argmax())
    return int(generator.choice(scores.size, p=token_probabilities(scores, settings)))


def token_probabilities(scores: Scores, settings: PredictConfig) -> Scores:
    """Probabilities to draw from, after temperature, top-k and top-p. Ties at the k-th score are all kept."""
    scores = scores / settings.temperature
    if 0 < settings.top_k < scores.size:
        kth = np.partition(scores, -settings.top_k)[-settings.top_k]
        scores = np.where(scores < kth, -np.inf, scores)
    probabilities: Scores = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    if settings.top_p < 1.0:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= settings.top_p]] = 0.0
        probabilities /= probabilities.sum()
    return probabilities

"""The choice of the next token from logits, in numpy, the same for both backends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.config.schema import PredictConfig
from common.errors import RunError
from common.tokenizer import Tokenizer

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Weights = NDArray[np.float64]

_BLOCK = 32
NOTHING_LEFT = "every token is forbidden; shorten predict.bad_words"


def choose_token(logits: Logits, settings: PredictConfig, generator: np.random.Generator) -> int:
    """Return the next token of one sequence.

    logits: (vocab_size,) float32 from ``LogitRules``, without padding of the vocabulary. Order as in transformers:
    temperature, top-k, top-p (Holtzman et al. 2020), min-p, draw. Raises RunError when the logits are not finite.
    """
    best = int(logits.argmax())  # the index of a NaN, if there is one
    if not np.isfinite(logits[best]):
        if logits[best] == -np.inf:
            raise RunError(NOTHING_LEFT)
        raise RunError(
            f"the model's logits hold {logits[best]}; its weights are broken or precision.compute"
            " is too narrow for them"
        )
    if settings.method == "greedy":
        return best
    ids, weights = token_weights(logits, settings)
    return int(ids[_place(weights, generator.random())])


def _place(weights: Weights, part: float) -> int:
    """Return the place at which the sum of weights exceeds a part of the whole sum.

    A sum for each of 50,257 weights takes longer than all the rest of a draw. So blocks are added
    up, and then the weights of one block.
    """
    starts = np.arange(0, weights.size, _BLOCK)
    blocks = np.add.reduceat(weights, starts).cumsum()
    wanted = part * blocks[-1]
    block = _first_above(blocks, wanted)
    begin, before = int(starts[block]), blocks[block - 1] if block else 0.0
    return begin + _first_above(weights[begin : begin + _BLOCK].cumsum(), wanted - before)


def _first_above(sums: Weights, wanted: float) -> int:
    """Return the place of the first sum above ``wanted``, at most that of the last weight above 0."""
    return int(min(sums.searchsorted(wanted, side="right"), sums.searchsorted(sums[-1])))


def token_weights(logits: Logits, settings: PredictConfig) -> tuple[Ids, Weights]:
    """Return the ids to draw from after temperature, top-k, top-p and min-p, and their weights, in
    proportion to their probabilities.

    Ids are in ascending order; the largest weight is 1. Ties at the k-th logit are all kept.
    """
    ids = np.arange(logits.size)
    if 0 < settings.top_k < logits.size:
        ids = largest_ids(logits, settings.top_k)
        logits = logits[ids]
    weights = logits.astype(np.float64)
    weights -= weights.max()
    if settings.temperature and settings.temperature != 1.0:
        weights /= settings.temperature
    np.exp(weights, out=weights)
    if settings.top_p < 1.0:
        kept = _nucleus(weights, settings.top_p * float(weights.sum()))
        ids, weights = ids[kept], weights[kept]
    if settings.min_p:
        kept = np.flatnonzero(weights >= settings.min_p * weights.max())
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def largest_ids(logits: Logits, count: int) -> Ids:
    """Return ids of the ``count`` largest logits and of those that tie with the last of them.

    A partition of 50,257 logits takes half a millisecond, so only candidates are partitioned. The count-th largest
    maximum of a group is at most the count-th largest logit. Logits below it need not be looked at.
    """
    whole = logits.size // _BLOCK * _BLOCK
    if count <= logits.size // (4 * _BLOCK):
        maxima = logits[:whole].reshape(_BLOCK, -1).max(0)  # of every n-th, which is fastest
        candidates = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
    else:
        candidates = np.arange(logits.size)
    values = logits[candidates]
    chosen: Ids = candidates[values >= np.partition(values, -count)[-count]]
    return chosen


def ranked_ids(values: Logits, count: int) -> Ids:
    """Return ids of the ``count`` largest values, the largest first; equal ones in order of their ids."""
    ids = largest_ids(values, min(count, values.size)) if count else np.empty(0, np.int64)
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def _nucleus(weights: Weights, mass: float) -> Ids:
    """Return places, ascending, of the fewest largest weights whose sum reaches ``mass``; equal
    weights are taken in order of their places.

    Positive floats have the same order as their bits. The exponent and four bits of the fraction
    sort them into buckets. Only the bucket in which the sum reaches ``mass`` must be sorted.
    """
    buckets = weights.view(np.int64) >> 48
    sums = np.bincount(buckets, weights)
    downwards = sums[::-1].cumsum()
    last = max(0, len(sums) - 1 - int(downwards.searchsorted(mass)))
    border = np.flatnonzero(buckets == last)
    border = border[np.argsort(-weights[border], kind="stable")]
    before = downwards[len(sums) - 1 - last] - sums[last] + weights[border].cumsum() - weights[border]
    kept = buckets > last
    kept[border[before < mass]] = True
    return np.flatnonzero(kept)


@dataclass(frozen=True, kw_only=True)
class ScoredToken:
    """A token of a text, generated or given."""

    id: int
    logprob: float
    """Natural logarithm of its probability after what precedes it."""
    top: list[tuple[int, float]]
    """The most probable ids at its place, the best first, and their log-probabilities."""


def score_token(logits: Logits, token: int, count: int) -> ScoredToken:
    """Score a token. logits: (vocab_size,) at its place, of the vocabulary without padding.

    count: how many of the most probable tokens to name; equal ones in order of their ids.
    """
    largest = logits.max()
    log_sum = float(np.log(np.exp(logits - largest).sum(dtype=np.float64))) + float(largest)
    return ScoredToken(
        id=token,
        logprob=float(logits[token]) - log_sum,
        top=[(int(each), float(logits[each]) - log_sum) for each in ranked_ids(logits, count)],
    )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return what a token adds to a text; ``bytes:\\xe2\\x80`` for a part of a character."""
    raw = tokenizer.decode_bytes([token])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

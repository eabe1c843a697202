"""Make initial weights with numpy, so that they are the same on every layout and framework.

Each block of 128 rows of a parameter has its own random generator, keyed by (seed, name, block). A
shard therefore makes exactly its own rows.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from common.config.resolved import ResolvedModel
from common.weights.names import EMBEDDING

ROWS_PER_BLOCK = 128


def initial_rows(
    model: ResolvedModel,
    seed: int,
    name: str,
    shape: tuple[int, ...],
    start: int = 0,
    stop: int | None = None,
    columns: tuple[int, int] | None = None,
) -> NDArray[np.float32]:
    """Return rows ``start`` to ``stop`` of parameter ``name``, whose whole shape is ``shape``.
    ``columns``: first and end of the columns to return.

    Biases are 0 and layer-norm gains 1. Weights are normal with deviation ``initializer_range``,
    and ``initializer_range / sqrt(2 x num_layers)`` for projections back into the residual stream
    (Radford et al. 2019, section 2.3). Rows of the embedding beyond the vocabulary are 0, and stay
    0, since their logits are masked.
    """
    stop = shape[0] if stop is None else stop
    width = slice(*columns) if columns else slice(None)
    if name.endswith(".bias"):
        return np.zeros((stop - start, *shape[1:]), np.float32)
    if ".ln_" in f".{name}":
        return np.ones((stop - start, *shape[1:]), np.float32)
    deviation = np.float32(model.initializer_range)
    if name.endswith("c_proj.weight"):
        deviation = np.float32(model.initializer_range / math.sqrt(2 * model.num_layers))
    rows = np.empty((stop - start, len(range(*width.indices(shape[1])))), np.float32)
    for block in range(start // ROWS_PER_BLOCK, -(-stop // ROWS_PER_BLOCK)):
        first = block * ROWS_PER_BLOCK
        made = _generator(seed, name, block).standard_normal((ROWS_PER_BLOCK, *shape[1:]), np.float32)
        here = slice(max(first, start), min(first + ROWS_PER_BLOCK, stop))
        rows[here.start - start : here.stop - start] = made[here.start - first : here.stop - first, width] * deviation
    if name == EMBEDDING and stop > model.vocab_size:
        rows[max(model.vocab_size - start, 0) :] = 0.0
    return rows


def _generator(seed: int, name: str, block: int) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))

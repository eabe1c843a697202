"""Order of an epoch by a keyed bijection, which is computed for single numbers without a table.

A Feistel network over pairs of numbers below a and b, whose product is at least n: Black and
Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002). Since a and b are close to the root of
n, nearly all results lie below n. The others go through the network again until they do (cycle
walking). NIST's FF1 (SP 800-38G) has the same rounds. Grain and TensorFlow (random_index_shuffle)
and NVIDIA's CCCL (shuffle_iterator, after Mitchell et al., Bandwidth-Optimal Random Shuffling for
GPUs, 2021) shuffle this way over powers of two.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
ORDER_VERSION = 2
"""Part of every fingerprint: raise it when the order of samples changes."""
_ROUNDS = 16
"""With 12, some orders of six numbers come more often than others."""
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Factors of SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
_BLOCK = 512


def shuffled(ids: Ids, n: int, purpose: str) -> tuple[Ids, Ids]:
    """Return the epochs (m,) of sample numbers (m,), and what is read there.

    An epoch reads each of 0 ... n - 1 once, in an order that depends only on its number, ``n`` and
    ``purpose``.
    """
    blocks, places = np.divmod(ids, _BLOCK)
    found = np.empty((2, len(ids)), dtype=np.int64)
    for block in np.unique(blocks):
        mine = blocks == block
        found[:, mine] = _block(int(block), n, purpose)[:, places[mine]]
    return found[0], found[1]


@lru_cache(maxsize=2**14)
def _block(number: int, n: int, purpose: str) -> Ids:
    """Return ``shuffled`` of consecutive sample numbers, since numpy is slow for few at a time."""
    epochs, places = np.divmod(np.arange(number * _BLOCK, (number + 1) * _BLOCK), n)
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        places[mine] = permuted(places[mine], n, f"{purpose}/{epoch}")
    return np.stack([epochs, places])


def permuted(places: Ids, n: int, purpose: str) -> Ids:
    """Return where a permutation of 0 ... n - 1 takes ``places``, (m,) numbers below n.

    Only whole numbers are computed, so it is equal on every machine.
    """
    digest = hashlib.shake_256(purpose.encode()).digest(8 * _ROUNDS)
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    a = math.isqrt(n - 1) + 1
    a += a % 2  # by an odd a and b, only even permutations could be made
    b = -(-n // a)
    found, walking = places.astype(np.uint64), np.arange(len(places))
    while len(walking):
        found[walking] = _through(found[walking], keys, np.uint64(a), np.uint64(b))
        walking = walking[found[walking] >= n]
    return found.astype(np.int64)


def _through(numbers: _Words, keys: _Words, a: np.uint64, b: np.uint64) -> _Words:
    """Return numbers below a * b after all rounds. Each moves one half by a hash of the other."""
    left, right = np.divmod(numbers, b)
    for key in keys:
        bits = right + key
        bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
        bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
        left, right = right, (left + (bits >> np.uint64(16))) % a
        a, b = b, a
    joined: _Words = left * b + right
    return joined


def drawn(below: int, purpose: str) -> int:
    """Return a number from 0 to ``below`` - 1 that depends only on the arguments."""
    return int.from_bytes(hashlib.shake_256(purpose.encode()).digest(16), "little") % below

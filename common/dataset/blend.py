"""Blends of several data sets in fixed proportions.

The data set of sample n is a pure function of n, found in O(log of their number), without an end.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Unpack

import numpy as np
import numpy.typing as npt

from common.dataset.fleetx import FleetXDataset, find_fleetx
from common.dataset.indexed import require_pair
from common.dataset.mindrecord import MindRecordSamples, find_mindrecord
from common.dataset.samples import GPTDataset, Ids, Order, Split
from common.errors import DataError

FINEST = 2**31
"""Largest denominator of a share, with which products of two counts fit into 64 bits."""


class Blend:
    """Samples of several data sets by weight, spread evenly.

    The data sets are leaves of a binary tree, Huffman's for the weights. Each node deals its
    samples to its two sides. Of its first n samples, the left side gets n * share, rounded. So the
    count of a data set after n samples is known without a table. It is within 2 of its share for
    any n: each node adds at most 1/2, of which a data set gets its part of the node. Nodes grow at
    least as Fibonacci's numbers towards the root, so all together add less than 1.7.
    Shares are exact for weights whose sum has at most FINEST as denominator, else rounded to that.

    weights: finite and above 0; the attribute holds the shares in use, which add up to 1.
    Raises DataError for a weight that is too small.
    """

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[float]) -> None:
        assert len(datasets) == len(weights) and len({dataset.seq_length for dataset in datasets}) == 1
        self.datasets = tuple(datasets)
        self.seq_length: int = datasets[0].seq_length
        # in so many samples those of small sets with large weights repeat, and others are not all read
        self.samples_per_epoch: int = sum(dataset.samples_per_epoch for dataset in datasets)
        exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth
        unit = math.lcm(*(weight.denominator for weight in exact))
        parts = [int(weight * unit) for weight in exact]
        counts = apportion(min(FINEST, sum(parts) // math.gcd(*parts)), parts)
        for count, weight, dataset in zip(counts, weights, datasets, strict=True):
            if not count:
                raise DataError(
                    f"the weight of {dataset.source(0)} is {weight:g}, less than half a sample in {FINEST:,}: it"
                    " would never be read; raise the weight or leave the data set out"
                )
        self.weights = tuple(count / sum(counts) for count in counts)
        identity = ["tree", counts, [dataset.fingerprint for dataset in datasets]]
        self.fingerprint: str = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
        # leaves have the numbers of the data sets, and the root has the last
        leaves = len(datasets)
        self._whole = np.ones(2 * leaves - 1, dtype=np.int64)
        self._share = np.ones_like(self._whole)
        self._sides = np.stack([np.arange(len(self._whole))] * 2, axis=1)
        heap = [(count, number, 0) for number, count in enumerate(counts)]
        heapq.heapify(heap)
        for node in range(leaves, 2 * leaves - 1):
            (right, right_side, right_depth), (left, left_side, left_depth) = (heapq.heappop(heap), heapq.heappop(heap))
            self._whole[node], self._share[node] = left + right, left
            self._sides[node] = left_side, right_side
            heapq.heappush(heap, (left + right, node, 1 + max(left_depth, right_depth)))
        self._depth = heap[0][2]

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Map sample numbers to data sets and to samples within them.

        ids: (n,). Returns two arrays (n,): numbers of the data sets, and sample numbers within them.
        """
        inner = np.asarray(ids, dtype=np.int64)
        nodes = np.full(len(inner), len(self._whole) - 1)
        for _ in range(self._depth):  # a leaf gives all samples to itself
            whole, share = self._whole[nodes], self._share[nodes]
            rounds, rest = np.divmod(inner, whole)
            before = rounds * share + (rest * share + whole // 2) // whole
            after = rounds * share + ((rest + 1) * share + whole // 2) // whole
            is_left = after > before
            inner = np.where(is_left, before, inner - before)
            nodes = self._sides[nodes, np.where(is_left, 0, 1)]
        return nodes, inner

    def read(self, ids: Ids) -> npt.NDArray[np.int32]:
        """Read samples. ids: (n,) numbers >= 0. Returns (n, seq_length + 1) int32 tokens."""
        numbers, inner = self.locate(ids)
        out = np.empty((len(numbers), self.seq_length + 1), dtype=np.int32)
        for number in np.unique(numbers):
            mine = numbers == number
            out[mine] = self.datasets[number].read(inner[mine])
        return out

    def identities(self, ids: Ids) -> Ids:
        """Return (n, 2) for sample numbers (n,): data set, epoch * windows + window within it."""
        numbers, inner = self.locate(ids)
        result = np.empty((len(numbers), 2), dtype=np.int64)
        result[:, 0] = numbers
        for number in np.unique(numbers):
            mine = numbers == number
            result[mine, 1] = self.datasets[number].identities(inner[mine])[:, 1]
        return result

    def source(self, sample: int) -> Path:
        numbers, inner = self.locate(np.array([sample]))
        return self.datasets[int(numbers[0])].source(int(inner[0]))


Samples = GPTDataset | MindRecordSamples | Blend
"""Source of the sampler: one data set, or a blend of several."""


def apportion(whole: int, parts: Sequence[int]) -> list[int]:
    """Divide ``whole`` into whole numbers in proportion to ``parts``, by largest remainder."""
    total = max(1, sum(parts))
    counts = [whole * part // total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda n: -(whole * parts[n] % total))
    for n in by_remainder[: whole - sum(counts)]:
        counts[n] += 1
    return counts


def parse_blend(data: Sequence[str]) -> tuple[tuple[float | None, str], ...]:
    """Parse ``[weight, prefix, weight, prefix, ...]`` or ``[prefix, prefix, ...]`` into pairs
    (weight, prefix). A weight of None is the number of windows, as with Megatron's ``--data-path A
    B`` (megatron-core 0.16.1, datasets/utils.py): an epoch reads each window once.

    Raises DataError for any other list, and for a weight that is not positive.
    """
    form = "expected PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ..."
    pairs: list[tuple[float | None, str]] = []
    if all(_weight(entry) is None for entry in data):
        pairs = [(None, prefix) for prefix in data]
    elif not len(data) % 2:
        pairs = [(_weight(text), prefix) for text, prefix in zip(data[::2], data[1::2], strict=True)]
        for (weight, prefix), text in zip(pairs, data[::2], strict=True):
            if weight is None:
                raise DataError(f"data set list {list(data)}: {text!r} stands where a weight belongs; {form}")
            if not math.isfinite(weight) or weight <= 0:
                raise DataError(
                    f"the weight of {prefix} is {weight:g}, expected a number > 0; leave out a data"
                    " set that should not be read"
                )
    if not pairs:
        raise DataError(f"data set list {list(data)}: has {len(data)} entries; {form}")
    (twice, times), *_ = Counter(prefix for _, prefix in pairs).most_common(1)
    if times > 1:
        raise DataError(
            f"data set list {list(data)}: {twice!r} is named twice; name it once with the sum of its weights"
        )
    return tuple(pairs)


def _weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def part_names(prefixes: Sequence[str]) -> list[str]:
    """Return short names of data sets for logs and metrics, all different.

    They are the last parts of the paths, or longer where these are equal. Other characters than
    letters, digits, ``_``, ``-`` and ``.`` become ``_``, since trackers refuse some.
    """
    numbered = [f"{prefix}-{number}" for number, prefix in enumerate(prefixes, 1)]
    for texts in ([Path(prefix).name for prefix in prefixes], prefixes, numbered):
        names = [re.sub(r"[^\w.-]+", "_", text).strip("_") or "data" for text in texts]
        if len(set(names)) == len(names):
            break
    return names


def windows_by_part(windows: Sequence[int], limit: int) -> list[int]:
    """Return how many of the first ``limit`` windows of a validation come from each part.

    They are in proportion to the windows that the parts have, so the mean is an estimate of that
    over all windows. Each part has one first, if the limit allows that.
    """
    limit = min(limit, sum(windows))
    least = int(limit >= len(windows))
    rest = apportion(limit - least * len(windows), [count - least for count in windows])
    return [least + count for count in rest]


def require_data(prefix: str) -> None:
    """Raise DataError unless a data set exists in a format that ``open_samples`` reads."""
    if find_mindrecord(prefix) is None and find_fleetx(prefix) is None:
        require_pair(prefix)


def open_samples(
    data: Sequence[str],
    *,
    split: Split,
    seq_length: int,
    stride: int | None = None,
    padded: bool = False,
    **order: Unpack[Order],
) -> Samples:
    """Return one data set, or the blend that ``data`` describes (see ``parse_blend``).

    Each data set is a .bin/.idx pair, a MindRecord or a set of FleetX's token files. padded: accept
    rows of a MindRecord whose mask has a 0. Raises DataError.
    """
    datasets: list[Samples] = []
    weights = []
    for weight, prefix in parse_blend(data):
        if find_mindrecord(prefix) is None:
            found = find_fleetx(prefix)
            source = FleetXDataset(found) if found else prefix
            datasets.append(GPTDataset(source, split=split, seq_length=seq_length, stride=stride, **order))
        elif stride in (None, seq_length):
            datasets.append(MindRecordSamples(prefix, split=split, seq_length=seq_length, padded=padded, **order))
        else:
            raise DataError(
                f"{prefix}: the rows of a MindRecord are windows already, which data.stride="
                f"{stride} cannot cut again; leave data.stride out, or train from a .bin/.idx"
                " pair"
            )
        weights.append(datasets[-1].samples_per_epoch if weight is None else weight)
    return datasets[0] if len(datasets) == 1 else Blend(datasets, weights)

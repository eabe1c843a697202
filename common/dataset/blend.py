"""Blends of several data sets in fixed proportions.

The data set of sample n is a pure function of n, found in O(1), without an end.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.dataset.fleetx import FleetXDataset, find_fleetx
from common.dataset.indexed import require_pair
from common.dataset.mindrecord import MindRecordSamples, find_files, is_mindrecord
from common.dataset.samples import GPTDataset, Samples
from common.dataset.split import Split
from common.errors import DataError

Ids = npt.NDArray[np.int64]
PERIOD = 10_000


class Blend:
    """Samples of several data sets by weight, spread evenly.

    After any n samples the count of each data set is within 1 of its share. Weights are rounded to
    multiples of 1 / period by largest remainder. The pattern of one period then repeats.
    Raises DataError for weights that are not positive, or too small for the period.
    """

    def __init__(
        self, datasets: Sequence[Samples], weights: Sequence[float], period: int = PERIOD
    ) -> None:
        if not datasets or len(datasets) != len(weights):
            raise DataError(
                f"a blend of {len(datasets)} data sets has {len(weights)} weights; give one weight"
                " for each"
            )
        lengths = sorted({dataset.seq_length for dataset in datasets})
        if len(lengths) > 1:
            raise DataError(
                f"the data sets of a blend have different seq_length: {lengths}; open all with the"
                " same one"
            )
        self.datasets = tuple(datasets)
        self.period = period
        names = [str(dataset.source(0)) for dataset in datasets]
        self._counts = np.array(quantise(weights, period, names), dtype=np.int64)
        self._pattern = interleave(self._counts.tolist())
        # number of earlier samples of the same data set within the period
        self._rank = np.zeros(period, dtype=np.int64)
        for number in range(len(datasets)):
            mine = np.flatnonzero(self._pattern == number)
            self._rank[mine] = np.arange(len(mine))

    @property
    def seq_length(self) -> int:
        return self.datasets[0].seq_length

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the shares in use, after rounding."""
        return tuple(count / self.period for count in self._counts.tolist())

    @property
    def samples_per_epoch(self) -> int:
        """Return the number of samples before the first data set starts over."""
        first_repeats = []
        for number, dataset in enumerate(self.datasets):
            periods, rank = divmod(dataset.samples_per_epoch, int(self._counts[number]))
            first_repeats.append(
                periods * self.period + int(np.flatnonzero(self._pattern == number)[rank])
            )
        return min(first_repeats)

    @property
    def fingerprint(self) -> str:
        parts = [
            self.period,
            self._counts.tolist(),
            [dataset.fingerprint for dataset in self.datasets],
        ]
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def locate(self, ids: Ids) -> tuple[Ids, Ids]:
        """Map sample numbers to data sets and to samples within them.

        ids: (n,). Returns two arrays (n,): numbers of the data sets, and sample numbers within
        them.
        """
        periods, places = np.divmod(np.asarray(ids, dtype=np.int64), self.period)
        numbers = self._pattern[places]
        return numbers, periods * self._counts[numbers] + self._rank[places]

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


def quantise(weights: Sequence[float], period: int, names: Sequence[str]) -> list[int]:
    """Return counts in proportion to ``weights`` that add up to ``period``, by largest remainder.

    names: of the data sets, for messages. Raises DataError for a weight that is not positive or too
    small.
    """
    for weight, name in zip(weights, names, strict=True):
        if not math.isfinite(weight) or weight <= 0:
            raise DataError(
                f"the weight of {name} is {weight:g}, expected a number > 0; leave out a data set"
                " that should not be read"
            )
    if not math.isfinite(sum(weights)):
        raise DataError(
            f"the weights of {', '.join(names)} add up to more than a float holds; give smaller"
            " numbers"
        )
    exact = [weight / math.fsum(weights) * period for weight in weights]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: (counts[n] - exact[n], n))
    for n in by_remainder[: period - sum(counts)]:
        counts[n] += 1
    for count, weight, name in zip(counts, weights, names, strict=True):
        if count == 0:
            raise DataError(
                f"the weight of {name} is {weight:g} of {math.fsum(weights):g}, less than half a"
                f" sample in {period}: it would never be read; raise the weight or leave the data"
                " set out"
            )
    return counts


def interleave(counts: Sequence[int]) -> Ids:
    """Return data set numbers (sum of counts,), each spread evenly.

    In every prefix each count is within 1 of its share. The schedule is earliest deadline first:
    the j-th sample of data set d belongs into places floor(j * P / c) ... ceil((j + 1) * P / c) -
    1. Such a schedule always exists (Baruah et al. 1996, "Proportionate progress"). Taking the data
    set with the largest deficit is simpler, but leaves these bounds from three data sets on.
    """
    period = sum(counts)
    pattern = np.empty(period, dtype=np.int64)
    released: list[list[int]] = [[] for _ in range(period)]
    for number in range(len(counts)):
        released[0].append(number)
    taken = [0] * len(counts)
    ready: list[tuple[int, int]] = []
    for place in range(period):
        for number in released[place]:
            heapq.heappush(ready, (-(-(taken[number] + 1) * period // counts[number]), number))
        _, number = heapq.heappop(ready)
        pattern[place] = number
        taken[number] += 1
        if taken[number] < counts[number]:
            released[max(place + 1, taken[number] * period // counts[number])].append(number)
    return pattern


def parse_blend(data: Sequence[str]) -> tuple[tuple[float, str], ...]:
    """Parse ``[prefix]`` or ``[weight, prefix, weight, prefix, ...]`` into pairs (weight, prefix).

    Raises DataError for any other list.
    """
    if len(data) == 1:
        return ((1.0, data[0]),)
    form = "expected PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ..."
    if not data or len(data) % 2:
        raise DataError(f"data set list {list(data)}: has {len(data)} entries; {form}")
    pairs = []
    for text, prefix in zip(data[::2], data[1::2], strict=True):
        try:
            pairs.append((float(text), prefix))
        except ValueError:
            raise DataError(
                f"data set list {list(data)}: {text!r} stands where a weight belongs; {form}"
            ) from None
    prefixes = [prefix for _, prefix in pairs]
    twice = next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None)
    if twice is not None:
        raise DataError(
            f"data set list {list(data)}: {twice!r} is named twice; name it once with the sum of"
            " its weights"
        )
    return tuple(pairs)


def require_data(prefix: str) -> None:
    """Raise DataError unless a data set exists in a format that ``open_samples`` reads."""
    if is_mindrecord(prefix):
        find_files(prefix)
    elif find_fleetx(prefix) is None:
        require_pair(prefix)


def open_samples(
    data: Sequence[str],
    *,
    split: Split,
    seq_length: int,
    seed: int,
    stride: int | None = None,
    split_weights: Sequence[float] = (949, 50, 1),
    shuffle: bool = True,
    cache_folder: Path | None = None,
) -> Samples:
    """Return one data set, or the blend that ``data`` describes (see ``parse_blend``).

    Each data set is a .bin/.idx pair, a MindRecord or a set of FleetX's token files. Raises
    DataError.
    """
    pairs = parse_blend(data)

    def open_one(prefix: str) -> Samples:
        if is_mindrecord(prefix):
            if stride not in (None, seq_length):
                raise DataError(
                    f"{prefix}: the rows of a MindRecord are windows already, which data.stride="
                    f"{stride} cannot cut again; leave data.stride out, or train from a .bin/.idx"
                    " pair"
                )
            return MindRecordSamples(
                prefix,
                split=split,
                seq_length=seq_length,
                seed=seed,
                split_weights=split_weights,
                shuffle=shuffle,
            )
        return GPTDataset(
            prefix if find_fleetx(prefix) is None else FleetXDataset(prefix),
            split=split,
            seq_length=seq_length,
            seed=seed,
            stride=stride,
            split_weights=split_weights,
            shuffle=shuffle,
            cache_folder=cache_folder,
        )

    datasets = [open_one(prefix) for _, prefix in pairs]
    return datasets[0] if len(datasets) == 1 else Blend(datasets, [weight for weight, _ in pairs])

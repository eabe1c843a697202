"""Speeds of the cells of a study, and how certain the differences between them are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from statistics import fmean, median, stdev

import numpy as np

from common.study.results import CellResult, Measured, Prediction, Repeat, State, Study

CONFIDENCE = 0.95
"""Probability that no two equal cells of a comparison are called different."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A cell over its repeats: medians, and for memory the most that any repeat took."""

    result: CellResult
    runs: tuple[Repeat, ...]
    """The repeats that finished and were measured."""
    speeds: Mapping[int, float]
    """Tokens a second by the index of the repeat."""
    tokens_per_second: float | None
    samples_per_second: float | None
    step_seconds: float | None
    split: Mapping[str, float]
    """Seconds a step by part, of those parts that are known."""
    peak_memory: tuple[int, ...]
    """Bytes of each rank."""
    mfu: float | None
    speed_up: float | None = None
    """Against the cell's baseline: the median over repeats that both finished."""
    efficiency: float | None = None
    """The speed-up by the ratio of ranks."""

    @property
    def id(self) -> str:
        return self.result.cell.id

    @property
    def planned(self) -> Prediction:
        """The plan of the cell; an empty one where nothing was predicted."""
        return self.result.prediction or Prediction()

    @property
    def first(self) -> Measured | None:
        """The measurements of the first repeat that finished."""
        return self.runs[0].measured if self.runs else None

    @property
    def counted_memory(self) -> int | None:
        """Bytes of tensors on the fullest rank, where state and step were both counted."""
        parts = self.first.memory_parts if self.first else {}
        return sum(parts.values()) if parts.keys() >= {"state", "step"} else None

    @property
    def state(self) -> State | None:
        """Finished if any repeat did, else what became of the last one; None: not run yet."""
        if self.runs:
            return State.FINISHED
        return self.result.repeats[-1].state if self.result.repeats else None

    @property
    def failures(self) -> tuple[Repeat, ...]:
        return tuple(run for run in self.result.repeats if run not in self.runs)


def summarize(study: Study) -> dict[str, Summary]:
    """Return the summary of every cell, by id in the order of the study."""
    cells = {result.cell.id: _measured(result) for result in study.cells}
    for name, cell in cells.items():
        base = cells.get(cell.result.cell.baseline or "")
        if base is None or not (cell.tokens_per_second and base.tokens_per_second):
            continue
        pairs = [cell.speeds[index] / base.speeds[index] for index in _common([cell, base])]
        speed_up = median(pairs or [cell.tokens_per_second / base.tokens_per_second])
        ranks = cell.result.cell.ranks / base.result.cell.ranks
        cells[name] = replace(cell, speed_up=speed_up, efficiency=speed_up / ranks)
    return cells


def _measured(result: CellResult) -> Summary:
    runs = tuple(run for run in result.repeats if run.state is State.FINISHED and run.measured is not None)
    measured = {run.index: run.measured for run in runs if run.measured is not None}
    found = list(measured.values())
    seconds = {n: median(each.step_seconds) for n, each in measured.items() if each.step_seconds}
    speeds = {n: measured[n].tokens_per_step / took for n, took in seconds.items() if took}
    splits: dict[str, list[float]] = {}
    for part, value in chain.from_iterable(each.split.items() for each in found):
        if value is not None:
            splits.setdefault(part, []).append(value)
    ranks = zip_longest(*(each.peak_memory for each in found), fillvalue=0)
    return Summary(
        result=result,
        runs=runs,
        speeds=speeds,
        tokens_per_second=_median(speeds.values()),
        samples_per_second=_median(measured[n].samples_per_step / took for n, took in seconds.items() if took),
        step_seconds=_median(seconds.values()),
        split={part: median(values) for part, values in splits.items()},
        peak_memory=tuple(map(max, ranks)),
        mfu=_median(each.mfu for each in found if each.mfu is not None),
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _common(cells: Sequence[Summary]) -> list[int]:
    """Return the indices of the repeats that all of these cells have."""
    return sorted(set.intersection(*(set(cell.speeds) for cell in cells))) if cells else []


# ---- which of two is faster ----


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ratio of the speeds of two cells, over the repeats that both have."""

    ratio: float
    """Speed of the one by the speed of the other, 1 where they are equal."""
    margin: float | None
    """Relative difference that repeats explain without another cause; None with fewer than two common repeats."""
    pairs: int

    @property
    def is_faster(self) -> bool:
        """Whether the difference is more than repeats explain."""
        return self.margin is not None and math.log(self.ratio) > math.log1p(self.margin)


def noise_of(cells: Sequence[Summary]) -> tuple[float, int]:
    """Return the standard deviation of a paired difference of log speeds, pooled over the cells,
    and its degrees of freedom.

    Cells and repeats are the two ways of a classification without interaction: what slows a whole
    round of repeats is not noise. (0, 0) where there is nothing to estimate it from.
    """
    several = [cell for cell in cells if len(cell.speeds) > 1]
    common = _common(several)
    freedom = (len(several) - 1) * (len(common) - 1)
    if len(several) < 2 or freedom < 1:
        return 0.0, 0
    logs = np.log([[cell.speeds[index] for index in common] for cell in several])
    residual = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    return math.sqrt(2 * float(np.square(residual).sum()) / freedom), freedom


def compare(one: Summary, other: Summary, *, noise: tuple[float, int] = (0.0, 0), comparisons: int = 1) -> Comparison:
    """Return how much faster ``one`` is than ``other``.

    noise: of ``noise_of``. comparisons: how many are made together; the margin of each grows, so
    that all of them hold together (Bonferroni). The margin is Student's interval of the mean paired
    difference, by the pair's own deviation or the pooled one, whichever is larger.
    """
    differences = [math.log(one.speeds[index] / other.speeds[index]) for index in _common([one, other])]
    if not differences:
        assert one.tokens_per_second and other.tokens_per_second
        ratio = one.tokens_per_second / other.tokens_per_second
        return Comparison(ratio=ratio, margin=None, pairs=0)
    pairs = len(differences)
    margin = None
    if pairs > 1:
        from scipy.special import stdtrit  # of the extra study

        level = 1 - (1 - CONFIDENCE) / comparisons
        own = stdev(differences)
        pooled, freedom = noise if noise[1] else (own, pairs - 1)
        quantile = float(stdtrit(freedom, (1 + level) / 2))
        margin = math.expm1(quantile * max(own, pooled) / math.sqrt(pairs))
    return Comparison(ratio=math.exp(fmean(differences)), margin=margin, pairs=pairs)

"""Speeds of the cells of a study, and how certain the differences between them are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, median, stdev

import numpy as np

from common.accelerators import GIB
from gpt2_study.results import CellResult, Prediction, State, Study

PARTS = {"forward_backward": "forward and backward"}
"""Parts of a step whose names say too little."""
CONFIDENCE = 0.95
"""Probability that no two equal cells of a comparison are called different."""


class Summary:
    """A cell over its repeats: medians, and for memory the most that any repeat took."""

    speed_up: float | None = None
    """Against the cell's baseline: the median over repeats that both finished."""
    efficiency: float | None = None
    """The speed-up by the ratio of ranks."""

    def __init__(self, result: CellResult) -> None:
        self.cell, self.id, self.repeats = result.cell, result.cell.id, result.repeats
        self.planned = result.prediction or Prediction()
        self.runs = {
            run.index: run.measured
            for run in result.repeats
            if run.state is State.FINISHED and run.measured is not None
        }
        """The repeats that finished, by index."""
        self.failures = [run for run in result.repeats if run.index not in self.runs]
        found = [*self.runs.values()]
        self.first = found[0] if found else None
        last = result.repeats[-1].state if result.repeats else None
        self.state = State.FINISHED if found else last
        """Finished if any repeat did, else what became of the last one; None: not run yet."""
        seconds = {n: median(run.step_seconds) for n, run in self.runs.items() if run.step_seconds}
        timed = {n: took for n, took in seconds.items() if took}
        self.speeds = {n: self.runs[n].tokens_per_step / took for n, took in timed.items()}
        """Tokens a second by the index of the repeat."""
        self.tokens_per_second = _median(self.speeds.values())
        self.samples_per_second = _median(self.runs[n].samples_per_step / took for n, took in timed.items())
        self.step_seconds = _median(seconds.values())
        parts = [(part, value) for run in found for part, value in run.split.items() if value is not None]
        self.split = {part: median(value for name, value in parts if name == part) for part in dict(parts)}
        """Seconds a step by part, of those parts that are known."""
        self.peak_memory = [*map(max, zip_longest(*(run.peak_memory for run in found), fillvalue=0))]
        """Bytes of each rank."""
        counted = self.first.memory_parts if self.first else {}
        self.counted_memory = sum(counted.values()) if counted.keys() >= {"state", "step"} else None
        """Bytes of tensors on the fullest rank, where state and step were both counted."""
        self.mfu = _median(run.mfu for run in found if run.mfu is not None)


def summarize(study: Study) -> dict[str, Summary]:
    """Return the summary of every cell, by id in the order of the study."""
    cells = {result.cell.id: Summary(result) for result in study.cells}
    for cell in cells.values():
        base = cells.get(cell.cell.baseline or "")
        if base is not None and cell.tokens_per_second and base.tokens_per_second:
            pairs = [cell.speeds[index] / base.speeds[index] for index in _common([cell, base])]
            cell.speed_up = median(pairs or [cell.tokens_per_second / base.tokens_per_second])
            cell.efficiency = cell.speed_up / (cell.cell.ranks / base.cell.ranks)
    return cells


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _common(cells: Sequence[Summary]) -> list[int]:
    """Return the indices of the repeats that all of these cells have."""
    return sorted(set.intersection(*(set(cell.speeds) for cell in cells)))


def parts_of(cells: Iterable[Summary]) -> list[str]:
    """Return the parts of a step that take time in any cell, in one order for all studies."""
    splits = [cell.split for cell in cells]
    parts = dict.fromkeys(part for split in splits for part in split)
    return [part for part in parts if any(split.get(part) for split in splits)]


def unit_of_bytes(value: float) -> tuple[int, str]:
    """Return the unit in which sizes up to this one are written, and its name."""
    return (GIB, "GiB") if value >= GIB else (2**20, "MiB")


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
    common = _common(several) if len(several) > 1 else []
    if len(common) < 2:
        return 0.0, 0
    logs = np.log([[cell.speeds[index] for index in common] for cell in several])
    residual = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    freedom = (len(several) - 1) * (len(common) - 1)
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

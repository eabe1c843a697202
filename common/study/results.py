"""Results of a study: its cells, their repeats and what was measured, in ``study.json``.

The file is written after every repeat and holds all that tables, plots and reports need.

Speeds of the cells come from it, and how certain the differences between them are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import ConfigError
from common.files import atomic_write
from common.structured_files import MAX_JSON_BYTES, read_text

STUDY_FILE = "study.json"


class Record(BaseModel):
    """A part of study.json. NaN and infinities are written as texts, so that the file is JSON."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class State(StrEnum):
    """Outcome of a repeat."""

    FINISHED = "finished"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    REFUSED = "refused"


class Cell(Record):
    """One point of the matrix: a configuration that is run ``repeats`` times."""

    id: str
    """Readable, and safe as the name of a folder."""
    axes: dict[str, str]
    """The label on each axis of the study, in the order of the axes."""
    base: str = ""
    """File of the configuration that the settings add to, relative to the project where it is
    part of it.
    """
    settings: dict[str, Any]
    """Dotted keys of the configuration and their values, beside those of the base file."""
    backend: str
    engine: str
    ranks: int
    hosts: int = 1
    peer: str | None = None
    group: str | None = None
    """Cells of one group must compute the same losses; None: not compared."""
    baseline: str | None = None
    """Id of the cell against which speed-up and efficiency are counted."""


class Measured(Record):
    """Figures of one run. Lists over steps include the steps of warm-up, except step_seconds."""

    step_seconds: list[float]
    """Seconds of each measured step, without those of warm-up."""
    tokens_per_step: int
    samples_per_step: int
    loss: list[float]
    gradient_norm: list[float]
    validation_loss: float | None = None
    sample_hash: str | None = None
    """Hash of the samples up to the last step that recorded it."""
    peak_memory: list[int] = []
    """Bytes of each rank that recorded its peak, in the order of ranks."""
    peak_memory_source: str = ""
    """Source of peak_memory, such as "resident memory of the process"."""
    memory_parts: dict[str, int] = {}
    """Bytes by part on the fullest rank, tensors counted: state (weights and optimizer), step (what comes and goes
    within a step: gradients, activations, loss, buffers); a part that was not counted is absent.
    """
    split: dict[str, float | None] = {}
    """Seconds a step by part: data, forward_backward, communication, update; None: not known."""
    mfu: float | None = None
    first_step_seconds: float | None = None


class Repeat(Record):
    """One run of a cell."""

    index: int
    """Counted from 1."""
    state: State
    reason: str = ""
    """One line, empty where the run finished."""
    command: list[str]
    """Words that start the same run by hand."""
    folder: str
    """Relative to the folder of the study."""
    seconds: float
    """From the start of the launcher to its end."""
    measured: Measured | None = None


class Prediction(Record):
    """Plan of a cell."""

    memory: list[dict[str, int]] = []
    """Bytes of each rank by kind, in the order of ranks."""
    peak: list[int] = []
    """Bytes of each rank at most: the sum of its kinds, without what two of them share."""
    step_seconds: float | None = None
    reason: str = ""
    """Why something is missing."""


class CellResult(Record):
    """A cell, what was expected of it, and its runs so far in the order of their indices."""

    cell: Cell
    prediction: Prediction | None = None
    repeats: list[Repeat] = []


class Machine(Record):
    """Machine that the study ran on, as far as the launching host can tell."""

    host: str
    cpu: str
    cores: int
    memory: int
    """Bytes."""
    accelerators: list[str] = []


class Study(Record):
    """All of study.json."""

    format: int = 1
    name: str
    """Name of the definition's file, such as "precision"."""
    title: str
    small: bool = False
    definition: dict[str, Any]
    """The definition as it was run, with the small section and overrides put in."""
    warmup_steps: int
    measured_steps: int
    repeats: int
    tolerance: float
    """Relative difference up to which the losses of a group count as the same."""
    tolerance_reason: str = ""
    machine: Machine
    versions: dict[str, str]
    started: str
    """Local time with its offset, ISO 8601."""
    finished: str | None = None
    """None while repeats are missing."""
    cells: list[CellResult]

    def cell(self, name: str) -> CellResult:
        """Return the cell of this id. Raises KeyError."""
        return next(found for found in self.cells if found.cell.id == name)


def write_study(study: Study, folder: Path) -> None:
    """Write study.json into the folder, whole or not at all. Raises StorageError."""
    with atomic_write(folder / STUDY_FILE, "w") as file:
        file.write(study.model_dump_json(indent=1) + "\n")


def read_study(folder: Path) -> Study:
    """Return what a study has found so far. Raises ConfigError with the file and what is wrong."""
    path = folder / STUDY_FILE
    text = read_text(path, limit=8 * MAX_JSON_BYTES)
    try:
        return Study.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise ConfigError(
            f"{path}: {where + ': ' if where else ''}{fault['msg']}; the file is damaged or of"
            " another version of this project; run the study again in a new output_dir"
        ) from None


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
    def lowest(self) -> float | None:
        return min(self.speeds.values(), default=None)

    @property
    def highest(self) -> float | None:
        return max(self.speeds.values(), default=None)

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
    alone = {result.cell.id: _measured(result) for result in study.cells}
    return {name: _beside_baseline(found, alone) for name, found in alone.items()}


def _measured(result: CellResult) -> Summary:
    runs = tuple(run for run in result.repeats if run.state is State.FINISHED and run.measured is not None)
    measured = {run.index: run.measured for run in runs if run.measured is not None}
    found = list(measured.values())
    seconds = {n: median(each.step_seconds) for n, each in measured.items() if each.step_seconds}
    speeds = {n: measured[n].tokens_per_step / took for n, took in seconds.items() if took}
    samples = [measured[n].samples_per_step / took for n, took in seconds.items() if took]
    ranks = max((len(each.peak_memory) for each in found), default=0)
    return Summary(
        result=result,
        runs=runs,
        speeds=speeds,
        tokens_per_second=_median(speeds.values()),
        samples_per_second=_median(samples),
        step_seconds=_median(seconds.values()),
        split=_medians([each.split for each in found]),
        peak_memory=tuple(
            max(each.peak_memory[rank] for each in found if rank < len(each.peak_memory)) for rank in range(ranks)
        ),
        mfu=_median([each.mfu for each in found if each.mfu is not None]),
    )


def _beside_baseline(found: Summary, alone: Mapping[str, Summary]) -> Summary:
    base = alone.get(found.result.cell.baseline or "")
    if base is None:
        return found
    pairs = [found.speeds[index] / base.speeds[index] for index in _common([found, base])]
    speed_up = _median(pairs)
    if speed_up is None and found.tokens_per_second and base.tokens_per_second:
        speed_up = found.tokens_per_second / base.tokens_per_second
    if speed_up is None:
        return found
    ranks = found.result.cell.ranks / base.result.cell.ranks
    return replace(found, speed_up=speed_up, efficiency=speed_up / ranks)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _medians(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the median of each key over the rows that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                columns.setdefault(name, []).append(value)
    return {name: median(column) for name, column in columns.items()}


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
    logs = [[math.log(cell.speeds[index]) for index in common] for cell in several]
    of_cells = [fmean(row) for row in logs]
    of_rounds = [fmean(column) for column in zip(*logs, strict=True)]
    whole = fmean(of_cells)
    squares = sum(
        (value - of_cell - of_round + whole) ** 2
        for row, of_cell in zip(logs, of_cells, strict=True)
        for value, of_round in zip(row, of_rounds, strict=True)
    )
    return math.sqrt(2 * squares / freedom), freedom


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

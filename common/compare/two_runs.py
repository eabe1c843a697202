"""Comparison of two run folders, step by step: samples, losses and gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.config.load import flatten
from common.errors import ConfigError
from common.study.results import Measured
from common.study.same_losses import OTHER_KERNELS, Departure, Kind, depart, relative_difference
from common.training.metrics import read_metrics
from common.yaml_files import read_yaml_mapping

TOLERANCE = 1e-6
"""Relative tolerance within one framework: float32 sums of the same terms in another order."""
_OWN = ("output_dir", "logging", "checkpoint", "context", "runtime", "profile", "serve", "predict")
"""Keys and sections that do not change what a step computes."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Rows of a run's steps by step, and its configuration with dotted keys."""

    folder: Path
    rows: Mapping[int, Mapping[str, Any]]
    keys: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of comparing two runs over the steps that both have."""

    steps: Sequence[int]
    tolerance: float
    keys: Mapping[str, tuple[Any, Any]]
    """Keys of the configuration that differ, with both values."""
    samples: int | None
    """First step after which the hashes of all samples read so far differ."""
    largest: Mapping[Kind, tuple[float, int]]
    """Largest relative difference of losses and of norms, and its step."""
    departure: Departure | None
    """First difference beyond the tolerance; ``step`` is that of the run."""


def read_run(folder: Path) -> RecordedRun:
    """Read metrics.jsonl and config.yaml of a run folder. Raises ConfigError."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give the folder of a run (output_dir)")
    # a resumed run repeats steps: the later row is the one that the run continued from
    rows = {row["step"]: row for row in read_metrics(file) if "loss" in row}
    if not rows:
        raise ConfigError(f"{file}: no step is recorded; train at least one step first")
    config = folder / "config.yaml"
    tree = read_yaml_mapping(config) if config.is_file() else {}
    return RecordedRun(folder=folder, rows=rows, keys=dict(flatten(tree)))


def compare_runs(one: RecordedRun, other: RecordedRun, tolerance: float | None) -> Comparison:
    """Compare two runs. tolerance: relative; None takes 1e-6, or 1e-4 between two frameworks.

    Raises ConfigError for runs without a common step.
    """
    steps = sorted(one.rows.keys() & other.rows.keys())
    if not steps:
        raise ConfigError(
            f"{one.folder} has steps {_range(one)}, and {other.folder} has steps {_range(other)}:"
            " no step is in both; compare runs that overlap"
        )
    if tolerance is None:
        frameworks = {run.keys.get("backend") for run in (one, other)}
        tolerance = TOLERANCE if len(frameworks) == 1 else OTHER_KERNELS
    found, expected = (_measured(run, steps) for run in (other, one))
    departure = depart(found, expected, tolerance)
    if departure is not None and departure.step:
        departure = replace(departure, step=steps[departure.step - 1])
    hashes = (step for step in steps if one.rows[step].get("sample_hash") != other.rows[step].get("sample_hash"))
    return Comparison(
        steps=steps,
        tolerance=tolerance,
        keys=dict(_other_keys(one.keys, other.keys)),
        samples=next(hashes, None),
        largest={
            Kind.LOSS: _largest(expected.loss, found.loss, steps),
            Kind.NORM: _largest(expected.gradient_norm, found.gradient_norm, steps),
        },
        departure=departure,
    )


def _measured(run: RecordedRun, steps: Sequence[int]) -> Measured:
    return Measured(
        step_seconds=[],
        tokens_per_step=0,
        samples_per_step=0,
        loss=[_number(run.rows[step], "loss") for step in steps],
        gradient_norm=[_number(run.rows[step], "grad_norm") for step in steps],
        sample_hash=run.rows[steps[-1]].get("sample_hash"),
    )


def _number(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    return math.nan if value is None else float(value)


def _largest(one: Sequence[float], other: Sequence[float], steps: Sequence[int]) -> tuple[float, int]:
    """Return the largest difference of finite values, and its step."""
    differences = [(relative_difference(a, b), step) for a, b, step in zip(one, other, steps, strict=True)]
    return max((each for each in differences if math.isfinite(each[0])), default=(math.nan, 0))


def _other_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in sorted(one.keys() | other.keys()):
        values = one.get(key), other.get(key)
        if key.partition(".")[0] not in _OWN and values[0] != values[1]:
            yield key, values


def _range(run: RecordedRun) -> str:
    return f"{min(run.rows)} to {max(run.rows)}"

"""The verdict of a study: who computed the same, who was fastest, and where the plan was wrong.

Losses are not enough. Adam and a clip that always acts hide a gradient that is wrong by a factor, so gradient norms
are compared too. Equal losses on other samples are an accident, so the hashes of the samples are compared. NaN equals
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from statistics import median
from typing import Any

from common.study.results import Cell, Measured, Study
from common.study.statistics import Summary, compare, noise_of, summarize

MEMORY_TOLERANCE = 0.10
"""Relative error of predicted memory up to which the plan counts as right."""


Remark = dict[str, Any]
"""``what`` names the sentence in the templates; ``mark`` says whether that is as it should be, wrong, or neither."""
MAX_LISTED = 5
"""Cells that differ and predictions that are wrong, listed one by one."""


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """Predicted against measured bytes of one cell, on the fullest rank of each."""

    cell: str
    kind: str
    """A key of memory_kinds in the templates."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted minus measured by measured."""
        return self.predicted / self.measured - 1

    @property
    def is_right(self) -> bool:
        return abs(self.error) <= MEMORY_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Verdict:
    groups: tuple[GroupVerdict, ...]
    rankings: tuple[Remark, ...]
    memory: tuple[MemoryCheck, ...]
    order: Remark | None
    """None where nothing was predicted or measured."""

    @property
    def different(self) -> dict[str, Difference]:
        return {each.cell: each for group in self.groups for each in group.different}


def judge(study: Study) -> Verdict:
    """Return the verdict of a study, whatever part of it has run."""
    cells = summarize(study)
    # with a speed, those of one model together: the others' tokens are not worth the same
    models: dict[str, list[Summary]] = {}
    for cell in cells.values():
        if cell.tokens_per_second:
            base, settings = cell.result.cell.base, cell.result.cell.settings
            model = [(key, settings[key]) for key in sorted(settings) if key.startswith("model.")]
            models.setdefault(repr((base, model)), []).append(cell)
    families = list(models.values())
    return Verdict(
        groups=tuple(judge_groups(cells, study.tolerance)),
        rankings=tuple(_rank(family, families) for family in families if len(family) > 1),
        memory=tuple(_memory(cells)),
        order=_order(families),
    )


# ---- speed ----


def _rank(family: Sequence[Summary], families: Sequence[Sequence[Summary]]) -> Remark:
    """Return which cell of a model is the fastest, and which cannot be told apart from it.

    axes: the labels that its cells share and other models' cells have not.
    """
    first, *rest = ordered = sorted(family, key=lambda cell: -(cell.tokens_per_second or 0))
    noise, comparisons = noise_of(ordered), len(ordered) * (len(ordered) - 1) // 2
    behind = {cell.id: compare(first, cell, noise=noise, comparisons=comparisons) for cell in rest}
    equal = [name for name, found in behind.items() if not found.is_faster]
    others = [cell.result.cell.axes for each in families if each is not family for cell in each]
    axes = [cell.result.cell.axes for cell in family]
    labels = [
        f"{axis}={text}"
        for axis, text in axes[0].items()
        if all(each.get(axis) == text for each in axes) and any(each.get(axis) != text for each in others)
    ]
    lead = behind[rest[0].id]
    remark: Remark = {"what": "fastest", "mark": "good", "axes": ", ".join(labels), "first": first.id}
    remark |= {"second": rest[0].id, "rate": first.tokens_per_second, "ratio": lead.ratio, "margin": lead.margin}
    if lead.margin is None:
        return remark | {"what": "fastest_once", "mark": "note"}
    if not equal:
        return remark
    slower = next((name for name in behind if name not in equal), "")
    return remark | {
        "what": "no_difference",
        "mark": "note",
        "cells": [first.id, *equal],
        "apart": max(abs(behind[name].ratio - 1) for name in equal),
        "margin": max(behind[name].margin or 0.0 for name in equal),
        "slower": slower,
        "ratio": behind[slower].ratio if slower else 1.0,
    }


# ---- predictions ----


def _memory(cells: Mapping[str, Summary]) -> Iterator[MemoryCheck]:
    for cell in cells.values():
        expected = cell.planned
        if not expected.peak or cell.first is None:
            continue
        planned = max(expected.peak)
        state = max((each.get("weights", 0) + each.get("optimizer", 0) for each in expected.memory), default=0)
        if parts := cell.first.memory_parts:
            pairs = {"state": (state, parts.get("state")), "step": (planned - state, parts.get("step"))}
        elif cell.peak_memory:
            kind = "resident" if "resident" in cell.first.peak_memory_source else "peak"
            pairs = {kind: (planned, max(cell.peak_memory))}
        else:
            continue
        for kind, (predicted, measured) in pairs.items():
            if measured:
                yield MemoryCheck(cell=cell.id, kind=kind, predicted=predicted, measured=measured)


def _order(families: Sequence[Sequence[Summary]]) -> Remark | None:
    """Return how many pairs of cells whose times can be told apart the plan has in the right order.

    wrong: faster cell, slower cell, by how much it was faster, and by how much the plan says it is.
    """
    pairs, wrong = 0, []
    for family in families:
        # not all cells do the same work a step, so speeds are compared
        speeds = {
            cell.id: cell.first.tokens_per_step / cell.planned.step_seconds
            for cell in family
            if cell.first and cell.planned.step_seconds
        }
        timed = [cell for cell in family if cell.id in speeds]
        noise, comparisons = noise_of(family), len(family) * (len(family) - 1) // 2
        for one, other in permutations(timed, 2):
            found = compare(one, other, noise=noise, comparisons=comparisons)
            if found.is_faster:
                pairs += 1
                planned = speeds[one.id] / speeds[other.id]
                if planned < 1:
                    wrong.append((one.id, other.id, found.ratio - 1, planned - 1))
    if not pairs:
        return None
    worst = sorted(wrong, key=lambda pair: -pair[2])[:MAX_LISTED]
    mark, right = "bad" if wrong else "good", pairs - len(wrong)
    return {"what": "order", "mark": mark, "right": right, "count": pairs, "wrong": worst}


# ---- losses ----


OTHER_KERNELS = 1e-4
"""Least tolerance between two frameworks, or this project and a peer: their float32 products add
up in another order in every layer.
"""


class Kind(StrEnum):
    """Kind of a difference between two runs."""

    STEPS = "steps"
    SAMPLES = "samples"
    LOSS = "loss"
    NORM = "gradient norm"


@dataclass(frozen=True, kw_only=True)
class Departure:
    """First difference of one run from another."""

    kind: Kind
    step: int = 0
    """Counted from 1; 0 where the difference is in no single step."""
    found: float | str
    expected: float | str
    relative: float = math.nan
    """Relative difference at that step; NaN where either value is not finite."""
    factor: float | None = None
    """Factor of all gradient norms, where it is one factor and the losses agree."""

    @property
    def is_finite(self) -> bool:
        """False where a loss or a norm is NaN or infinite, or nothing relative can be said."""
        return math.isfinite(self.relative)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A cell that does not compute what the reference of its group does."""

    cell: str
    repeat: int
    """The first one that departs."""
    reference: str
    departure: Departure


@dataclass(frozen=True, kw_only=True)
class GroupVerdict:
    """Cells that must compute the same losses, and whether they did."""

    name: str
    reference: str
    """The cell that most others agree with, the earliest of several."""
    tolerance: float
    """The widest that was used, between the reference and any cell."""
    same: tuple[str, ...]
    """Cells that agree with the reference, itself included."""
    different: tuple[Difference, ...]
    """The first difference of each other cell."""
    largest: Mapping[Kind, float]
    """Largest relative difference of losses and of norms among those that agree."""


def judge_groups(cells: Mapping[str, Summary], tolerance: float) -> Iterator[GroupVerdict]:
    """Yield the verdict of each group. A cell in no group is one of its own, which is left out
    where its repeats agree.
    """
    named: dict[tuple[str, bool], list[Summary]] = {}
    for name, cell in cells.items():
        if cell.first:
            group = cell.result.cell.group
            named.setdefault((name, False) if group is None else (group, True), []).append(cell)
    for (name, shared), members in named.items():
        verdict = _judge_group(name, members, tolerance)
        if shared or verdict.different:
            yield verdict


def _judge_group(name: str, cells: Sequence[Summary], tolerance: float) -> GroupVerdict:
    # the one-process cell is the natural reference, then the order of the study
    trials = []
    for reference in sorted(cells, key=lambda cell: cell.result.cell.baseline != cell.id):
        found = {cell.id: _first_difference(cell, reference, tolerance) for cell in cells}
        trials.append((reference, found))
        if not any(found.values()):
            break
    reference, found = max(trials, key=lambda trial: sum(not each for each in trial[1].values()))
    same = [cell for cell in cells if found[cell.id] is None]
    runs = [run.measured for cell in same for run in cell.runs if run.measured]
    expected = reference.first
    assert expected is not None
    return GroupVerdict(
        name=name,
        reference=reference.id,
        tolerance=max(_tolerance(tolerance, cell.result.cell, reference.result.cell) for cell in cells),
        same=tuple(cell.id for cell in same),
        different=tuple(each for each in found.values() if each is not None),
        largest={
            Kind.LOSS: max((_largest(run.loss, expected.loss) for run in runs), default=0.0),
            Kind.NORM: max((_largest(run.gradient_norm, expected.gradient_norm) for run in runs), default=0.0),
        },
    )


def _first_difference(cell: Summary, reference: Summary, tolerance: float) -> Difference | None:
    bound = _tolerance(tolerance, cell.result.cell, reference.result.cell)
    for run in cell.runs:
        assert run.measured is not None and reference.first is not None
        if departure := depart(run.measured, reference.first, bound):
            return Difference(cell=cell.id, repeat=run.index, reference=reference.id, departure=departure)
    return None


def _tolerance(tolerance: float, one: Cell, other: Cell) -> float:
    same = (one.backend, one.peer) == (other.backend, other.peer)
    return tolerance if same else max(tolerance, OTHER_KERNELS)


def depart(found: Measured, expected: Measured, tolerance: float) -> Departure | None:
    """Return where a run first departs from another, or None where they agree.

    Samples come first, since other samples explain other losses; then the earliest step, its loss
    before its norm. Hashes are compared where both runs have one.
    """
    loss = _first_step(found.loss, expected.loss, tolerance)
    norm = _first_step(found.gradient_norm, expected.gradient_norm, tolerance, _skipped(found, expected))
    hashes = found.sample_hash, expected.sample_hash
    if hashes[0] is not None and hashes[1] is not None and hashes[0] != hashes[1]:
        return Departure(kind=Kind.SAMPLES, step=loss or 0, found=hashes[0], expected=hashes[1])
    if first := min(filter(None, (loss, norm)), default=0):
        kind = Kind.LOSS if loss == first else Kind.NORM
        pair = (found.loss, expected.loss) if loss == first else (found.gradient_norm, expected.gradient_norm)
        value, other = (values[first - 1] for values in pair)
        relative, factor = relative_difference(value, other), None if loss else _common_factor(*pair)
        return Departure(kind=kind, step=first, found=value, expected=other, relative=relative, factor=factor)
    counts = [f"{len(run.loss)} and {len(run.gradient_norm)}" for run in (found, expected)]
    if counts[0] != counts[1] or not (found.loss and found.gradient_norm):
        return Departure(kind=Kind.STEPS, found=counts[0], expected=counts[1])
    return None


def _first_step(
    found: Sequence[float], expected: Sequence[float], tolerance: float, skipped: Collection[int] = ()
) -> int | None:
    """Return the first step, from 1, that differs by more than the tolerance or is not finite."""
    for step, (value, other) in enumerate(zip(found, expected, strict=False), 1):
        # NaN is not within any tolerance
        if step not in skipped and not relative_difference(value, other) <= tolerance:
            return step
    return None


def _skipped(found: Measured, expected: Measured) -> set[int]:
    """Return the steps that both runs skipped because the loss scale was too high: neither norm is
    finite, and the next losses are, which no run reaches that applied such a gradient.
    """
    return {
        step
        for step, norms in enumerate(zip(found.gradient_norm, expected.gradient_norm, strict=False), 1)
        if not any(map(math.isfinite, norms))
        and all(run.loss[step:] and math.isfinite(run.loss[step]) for run in (found, expected))
    }


def relative_difference(value: float, other: float) -> float:
    """Return the difference by the larger of both; NaN where one is not finite."""
    if not (math.isfinite(value) and math.isfinite(other)):
        return math.nan
    size = max(abs(value), abs(other))
    return abs(value - other) / size if size else 0.0


def _common_factor(found: Sequence[float], expected: Sequence[float]) -> float | None:
    """Return the ratio of norms where it is the same at every step but for a tenth of its distance
    from 1, steps left out that both runs skipped.
    """
    pairs = [pair for pair in zip(found, expected, strict=False) if any(map(math.isfinite, pair))]
    ratios = [a / b for a, b in pairs if b]
    if not ratios or not all(map(math.isfinite, ratios)):
        return None
    middle = median(ratios)
    apart = max(abs(ratio - middle) for ratio in ratios)
    return middle if apart < 0.1 * abs(middle - 1) else None


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of the steps that are finite in both."""
    pairs = map(relative_difference, found, expected)
    return max((value for value in pairs if math.isfinite(value)), default=0.0)

"""The verdict of a study: who computed the same, who was fastest, and where the plan was wrong.

Losses are not enough. Adam and a clip that always acts hide a gradient that is wrong by a factor, so gradient norms
are compared too. Equal losses on other samples are an accident, so the hashes of the samples are compared. NaN equals
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations
from statistics import median
from typing import Any

from gpt2_study.results import Cell, Measured, State, Study
from gpt2_study.statistics import Summary, compare, noise_of, summarize

MEMORY_TOLERANCE = 0.10
"""Relative error of predicted memory up to which the plan counts as right."""
Remark = dict[str, Any]
"""``what`` names the sentence in the templates; ``mark`` says whether that is as it should be, wrong, or neither."""
MAX_LISTED = 5
"""Cells that differ and predictions that are wrong, listed one by one."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The cells of a study in its order, and what is said of them."""

    cells: Mapping[str, Summary]
    groups: Sequence[Remark]
    """Cells that must compute the same losses. reference: the cell that most others agree with, the earliest of
    several. tolerance: the widest that was used, between the reference and any cell. same: cells that agree with the
    reference, itself included. different: the first difference of each other cell. largest: the largest relative
    difference of losses and of norms among those that agree.
    """
    memory: Sequence[Remark]
    """Predicted and measured bytes of a cell, on the fullest rank of each, by a kind of memory_kinds in the templates;
    and the error of the plan.
    """
    remarks: Sequence[Remark]
    """The lines of the verdict, most important first."""

    @property
    def different(self) -> dict[str, Departure]:
        return {name: found for group in self.groups for name, found in group["different"].items()}


def judge(study: Study) -> Verdict:
    """Return the verdict of a study, whatever part of it has run."""
    cells = summarize(study)
    groups, memory = [*_groups(cells.values(), study.tolerance)], [*_memory(cells.values())]
    # with a speed, those of one model together: the others' tokens are not worth the same
    models: dict[str, list[Summary]] = {}
    for cell in cells.values():
        if cell.tokens_per_second:
            settings = cell.cell.settings
            model = [(key, settings[key]) for key in sorted(settings) if key.startswith("model.")]
            models.setdefault(repr((cell.cell.base, model)), []).append(cell)
    families = list(models.values())
    found: list[Remark] = []
    running = [name for name, cell in cells.items() if cell.state in (None, State.FINISHED)]
    if missing := [name for name in running if len(cells[name].repeats) < study.repeats]:
        found.append(dict(what="unfinished", mark="note", cells=missing, count=len(cells)))
    found += [line for group in groups for line in _remarks_on_losses(group)]
    found += [_rank(family, families) for family in families if len(family) > 1]
    for state in State:
        failed = [name for name, cell in cells.items() if cell.state is state]
        if state is not State.FINISHED and failed:
            mark = "note" if state is State.REFUSED else "bad"
            found.append(dict(what="no_result", mark=mark, state=state, cells=failed, count=len(cells)))
    if partly := [name for name, cell in cells.items() if cell.runs and cell.failures]:
        found.append(dict(what="some_failed", mark="bad", cells=partly))
    found += [*_remarks_on_memory(memory), *_order(families)]
    return Verdict(cells=cells, groups=groups, memory=memory, remarks=found)


# ---- speed ----


def _rank(family: Sequence[Summary], families: Sequence[Sequence[Summary]]) -> Remark:
    """Return which cell of a model is the fastest, and which cannot be told apart from it.

    axes: the labels that its cells share and other models' cells have not.
    """
    first, *rest = ordered = sorted(family, key=lambda cell: -(cell.tokens_per_second or 0))
    noise, comparisons = noise_of(ordered), len(ordered) * (len(ordered) - 1) // 2
    behind = {cell.id: compare(first, cell, noise=noise, comparisons=comparisons) for cell in rest}
    equal = [name for name, found in behind.items() if not found.is_faster]
    others = [cell.cell.axes for each in families if each is not family for cell in each]
    axes = [cell.cell.axes for cell in family]
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


def _memory(cells: Iterable[Summary]) -> Iterator[Remark]:
    for cell in cells:
        expected = cell.planned
        if not expected.peak or cell.first is None:
            continue
        planned = max(expected.peak)
        state = max((each.get("weights", 0) + each.get("optimizer", 0) for each in expected.memory), default=0)
        pairs: dict[str, tuple[int, int | None]] = {}
        if parts := cell.first.memory_parts:
            pairs = {"state": (state, parts.get("state")), "step": (planned - state, parts.get("step"))}
        elif cell.peak_memory:
            kind = "resident" if "resident" in cell.first.peak_memory_source else "peak"
            pairs = {kind: (planned, max(cell.peak_memory))}
        for kind, (predicted, measured) in pairs.items():
            if measured:
                error = predicted / measured - 1
                yield dict(cell=cell.id, kind=kind, predicted=predicted, measured=measured, error=error)


def _remarks_on_memory(checks: Sequence[Remark]) -> Iterator[Remark]:
    """Yield one line for each kind of memory that was measured."""
    for kind in dict.fromkeys(check["kind"] for check in checks):
        of_kind = sorted((c for c in checks if c["kind"] == kind), key=lambda check: -abs(check["error"]))
        wrong = [check for check in of_kind if abs(check["error"]) > MEMORY_TOLERANCE]
        yield dict(
            what="memory",
            mark="good" if not wrong else "bad" if kind != "resident" else "note",
            kind=kind,
            bound=MEMORY_TOLERANCE,
            right=len(of_kind) - len(wrong),
            count=len(of_kind),
            wrong=wrong[:MAX_LISTED],
            more=len(wrong[MAX_LISTED:]),
        )


def _order(families: Sequence[Sequence[Summary]]) -> Iterator[Remark]:
    """Yield how many pairs of cells whose times can be told apart the plan has in the right order, if there are any.

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
    if pairs:
        worst = sorted(wrong, key=lambda pair: -pair[2])[:MAX_LISTED]
        yield dict(what="order", mark="bad" if wrong else "good", right=pairs - len(wrong), count=pairs, wrong=worst)


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
    repeat: int = 1
    """The repeat of a cell that departs."""
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


def _groups(cells: Iterable[Summary], tolerance: float) -> Iterator[Remark]:
    """Yield the verdict of each group. A cell in no group is one of its own, which is left out
    where its repeats agree.
    """
    named: dict[tuple[str, bool], list[Summary]] = {}
    for cell in cells:
        if cell.runs:
            shared = cell.cell.group is not None
            named.setdefault((cell.cell.group or cell.id, shared), []).append(cell)
    for (name, shared), members in named.items():
        verdict = _judge_group(name, members, tolerance)
        if shared or verdict["different"]:
            yield verdict


def _judge_group(name: str, cells: Sequence[Summary], tolerance: float) -> Remark:
    def bound(cell: Cell, other: Cell) -> float:
        same = (cell.backend, cell.peer) == (other.backend, other.peer)
        return tolerance if same else max(tolerance, OTHER_KERNELS)

    def first_departure(cell: Summary, reference: Summary, expected: Measured) -> Departure | None:
        for index, run in cell.runs.items():
            if departure := depart(run, expected, bound(cell.cell, reference.cell)):
                return replace(departure, repeat=index)
        return None

    trials = []
    # the one-process cell is the natural reference, then the order of the study
    for reference in sorted(cells, key=lambda cell: cell.cell.baseline != cell.id):
        expected = next(iter(reference.runs.values()))
        found = {cell.id: first_departure(cell, reference, expected) for cell in cells}
        same = [name for name, departure in found.items() if departure is None]
        trials.append((reference, expected, found, same))
        if len(same) == len(cells):
            break
    reference, expected, found, same = max(trials, key=lambda trial: len(trial[-1]))
    runs = [run for cell in cells if cell.id in same for run in cell.runs.values()]
    return dict(
        group="" if name == "all" else name,
        reference=reference.id,
        tolerance=max(bound(cell.cell, reference.cell) for cell in cells),
        same=same,
        different={name: departure for name, departure in found.items() if departure is not None},
        largest={
            Kind.LOSS: max((_largest(run.loss, expected.loss) for run in runs), default=0.0),
            Kind.NORM: max((_largest(run.gradient_norm, expected.gradient_norm) for run in runs), default=0.0),
        },
    )


def _remarks_on_losses(group: Remark) -> Iterator[Remark]:
    different = [*group["different"].items()]
    if len(group["same"]) > 1:
        yield {**group, "what": "same_losses", "mark": "good"}
    elif not different:
        yield {**group, "what": "not_compared", "mark": "note"}
    for cell, departure in different[:MAX_LISTED]:
        yield {**group, "what": "different", "mark": "bad", "cell": cell, "departure": departure}
    if left := [cell for cell, _ in different[MAX_LISTED:]]:
        yield {**group, "what": "different_too", "mark": "bad", "cells": left}


def depart(found: Measured, expected: Measured, tolerance: float) -> Departure | None:
    """Return where a run first departs from another, or None where they agree.

    Samples come first, since other samples explain other losses; then the earliest step, its loss
    before its norm. Hashes are compared where both runs have one.
    """
    losses = [*zip(found.loss, expected.loss, strict=False)]
    norms = [*zip(found.gradient_norm, expected.gradient_norm, strict=False)]

    def are_finite(pair: tuple[float, float]) -> bool:
        return all(map(math.isfinite, pair))

    def first(pairs: Sequence[tuple[float, float]], skipped: Collection[int] = ()) -> int:
        """Return the first step, from 1, that differs by more than the tolerance or is not finite; 0 for none."""
        # NaN is not within any tolerance
        beyond = (n for n, pair in enumerate(pairs, 1) if not relative_difference(*pair) <= tolerance)
        return next((step for step in beyond if step not in skipped), 0)

    # both skipped a step because the loss scale was too high: neither norm is finite, and the next
    # losses are, which no run reaches that applied such a gradient
    skipped = {
        step
        for step, pair in enumerate(norms, 1)
        if not any(map(math.isfinite, pair)) and any(map(are_finite, losses[step : step + 1]))
    }
    loss, norm = first(losses), first(norms, skipped)
    hashes = found.sample_hash, expected.sample_hash
    if hashes[0] is not None and hashes[1] is not None and hashes[0] != hashes[1]:
        return Departure(kind=Kind.SAMPLES, step=loss, found=hashes[0], expected=hashes[1])
    if step := min(filter(None, (loss, norm)), default=0):
        kind, (value, other) = (Kind.LOSS, losses[step - 1]) if loss == step else (Kind.NORM, norms[step - 1])
        relative, factor = relative_difference(value, other), None if loss else _common_factor(norms)
        return Departure(kind=kind, step=step, found=value, expected=other, relative=relative, factor=factor)
    counts = [f"{len(run.loss)} and {len(run.gradient_norm)}" for run in (found, expected)]
    if counts[0] != counts[1] or not (found.loss and found.gradient_norm):
        return Departure(kind=Kind.STEPS, found=counts[0], expected=counts[1])
    return None


def relative_difference(value: float, other: float) -> float:
    """Return the difference by the larger of both; NaN where one is not finite."""
    if not (math.isfinite(value) and math.isfinite(other)):
        return math.nan
    size = max(abs(value), abs(other))
    return abs(value - other) / size if size else 0.0


def _common_factor(norms: Sequence[tuple[float, float]]) -> float | None:
    """Return the ratio of norms where it is the same at every step but for a tenth of its distance
    from 1, steps left out that both runs skipped.
    """
    ratios = [a / b for a, b in norms if b and any(map(math.isfinite, (a, b)))]
    if not ratios or not all(map(math.isfinite, ratios)):
        return None
    middle = median(ratios)
    apart = max(abs(ratio - middle) for ratio in ratios)
    return middle if apart < 0.1 * abs(middle - 1) else None


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest difference of the steps that are finite in both."""
    pairs = map(relative_difference, found, expected)
    return max((value for value in pairs if math.isfinite(value)), default=0.0)

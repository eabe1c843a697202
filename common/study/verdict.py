"""The verdict of a study: who computed the same, who was fastest, and where the plan was wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from common.study.results import Study
from common.study.same_losses import Difference, GroupVerdict, judge_groups
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

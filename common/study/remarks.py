"""The lines of the verdict, as facts. ``what`` names the sentence in ``templates/en.j2`` and
``zh.j2``; ``mark`` says whether it is as it should be, wrong, or neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from common.study.results import State, Study
from common.study.same_losses import GroupVerdict, Kind
from common.study.statistics import Summary
from common.study.verdict import MEMORY_TOLERANCE, OrderCheck, Ranking, Verdict

Remark = dict[str, Any]
MAX_LISTED = 5
"""Cells that differ and predictions that are wrong, listed one by one."""


def remarks(study: Study, cells: Mapping[str, Summary], verdict: Verdict) -> list[Remark]:
    """Return the lines of the verdict, most important first."""
    return [
        *_unfinished(study, cells),
        *(line for group in verdict.groups for line in _group(group)),
        *(_ranking(ranking, cells) for ranking in verdict.rankings),
        *_failures(cells),
        *_memory(verdict),
        *(_order(verdict.order) if verdict.order else ()),
    ]


def _remark(what: str, mark: str, **facts: Any) -> Remark:
    return {"what": what, "mark": mark, **facts}


def _unfinished(study: Study, cells: Mapping[str, Summary]) -> Iterator[Remark]:
    missing = [
        name
        for name, cell in cells.items()
        if cell.state in (None, State.FINISHED) and len(cell.result.repeats) < study.repeats
    ]
    if missing:
        yield _remark("unfinished", "note", cells=missing, count=len(cells))


def _failures(cells: Mapping[str, Summary]) -> Iterator[Remark]:
    for state in State:
        failed = [name for name, cell in cells.items() if cell.state is state]
        if state is not State.FINISHED and failed:
            mark = "note" if state is State.REFUSED else "bad"
            yield _remark("no_result", mark, state=state, cells=failed, count=len(cells))
    partly = [name for name, cell in cells.items() if cell.runs and cell.failures]
    if partly:
        yield _remark("some_failed", "bad", cells=partly)


def _group(group: GroupVerdict) -> Iterator[Remark]:
    common = {
        "group": "" if group.name == "all" else group.name,
        "reference": group.reference,
        "all": not group.different,
    }
    if len(group.same) > 1:
        yield _remark(
            "same_losses",
            "good",
            **common,
            cells=group.same,
            tolerance=group.tolerance,
            loss=group.largest[Kind.LOSS],
            norm=group.largest[Kind.NORM],
        )
    elif not group.different:
        yield _remark("not_compared", "note", **common)
    for each in group.different[:MAX_LISTED]:
        yield _remark("different", "bad", **common | vars(each))
    if left := [each.cell for each in group.different[MAX_LISTED:]]:
        yield _remark("different_too", "bad", **common, cells=left)


def _ranking(ranking: Ranking, cells: Mapping[str, Summary]) -> Remark:
    first, second = ranking.cells[:2]
    lead, equal = ranking.behind[second], ranking.equal
    facts: dict[str, Any] = {
        "axes": ", ".join(f"{axis}={text}" for axis, text in ranking.labels.items()),
        "first": first,
        "rate": cells[first].tokens_per_second,
        "ratio": lead.ratio,
        "second": second,
        "margin": lead.margin,
    }
    if lead.margin is None:
        return _remark("fastest_once", "note", **facts)
    if not equal:
        return _remark("fastest", "good", **facts)
    found = [ranking.behind[name] for name in equal]
    slower = next((name for name in ranking.cells[1:] if name not in equal), "")
    facts |= {
        "cells": [first, *equal],
        "apart": max(abs(each.ratio - 1) for each in found),
        "margin": max(each.margin or 0.0 for each in found),
        "slower": slower,
        "ratio": ranking.behind[slower].ratio if slower else 1.0,
    }
    return _remark("no_difference", "note", **facts)


def _memory(verdict: Verdict) -> Iterator[Remark]:
    """Yield one line for each kind of memory that was measured."""
    for kind in dict.fromkeys(check.kind for check in verdict.memory):
        checks = [check for check in verdict.memory if check.kind == kind]
        wrong = sorted((check for check in checks if not check.is_right), key=lambda check: -abs(check.error))
        yield _remark(
            "memory",
            "good" if not wrong else "bad" if all(check.is_exact for check in wrong) else "note",
            kind=kind,
            bound=MEMORY_TOLERANCE,
            right=len(checks) - len(wrong),
            count=len(checks),
            wrong=wrong[:MAX_LISTED],
            more=len(wrong[MAX_LISTED:]),
        )


def _order(order: OrderCheck) -> Iterator[Remark]:
    yield _remark(
        "order",
        "bad" if order.wrong else "good",
        right=order.pairs - len(order.wrong),
        count=order.pairs,
        wrong=sorted(order.wrong, key=lambda pair: -pair[2])[:MAX_LISTED],
    )

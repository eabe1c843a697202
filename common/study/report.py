"""Tables, pictures and reports of a study, made from ``study.json``: facts are gathered here, and
worded by the templates.
"""

from __future__ import annotations

import base64
import html
import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path

import jinja2

from common.accelerators import GIB
from common.files import atomic_write
from common.study import table
from common.study.drawing import draw
from common.study.results import Machine, State, Study
from common.study.statistics import CONFIDENCE, Summary, summarize
from common.study.table import Table, Word, as_csv, main_table, split_table
from common.study.verdict import (
    MAX_LISTED,
    MEMORY_TOLERANCE,
    OTHER_KERNELS,
    Departure,
    GroupVerdict,
    Remark,
    Verdict,
    judge,
)
from common.yaml_files import dump_yaml

PAGE = "report.html"
REPORTS = {"report.md": "en", "report_zh.md": "zh"}


def write_outcome(study: Study, folder: Path) -> None:
    """Write tables, pictures and reports of whatever has been found so far into ``folder``.

    Older ones are replaced. Raises StorageError.
    """
    cells, verdict = summarize(study), judge(study)
    pictures = draw(study, cells, verdict, folder)
    failed = [
        [f"`{name}`", str(run.index), Word(run.state), run.reason or "–"]
        for name, cell in cells.items()
        for run in cell.failures
    ]
    more = {
        "Time of a step": split_table(cells),
        "Cells without a result": Table(head=["cell", "repeat", "state", "reason"], rows=failed, words=True),
    }
    blocks = {"The definition of the study, as it was run": dump_yaml(study.definition).rstrip("\n")}
    typed = [(each.cell.id, next((run.command for run in each.repeats if run.command), None)) for each in study.cells]
    if commands := [f"# {name}\n{shlex.join(command)}" for name, command in typed if command]:
        blocks["One command a cell"] = "\n".join(commands)
    facts = {
        "title": study.title,
        "study": vars(study)
        | {
            "day": datetime.fromisoformat(study.started).strftime("%Y-%m-%d %H:%M"),
            "devices": _devices(study.machine),
            "confidence": CONFIDENCE,
            "other_kernels": OTHER_KERNELS,
        },
        "remarks": remarks(study, cells, verdict),
        "results": main_table(study, cells, verdict),
        "pictures": {name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
        "more": [(title, table) for title, table in more.items() if table and table.rows],
        "method": ["how_timed", "how_compared", "how_judged"],
        "machine": _machine(study),
        "blocks": [*blocks.items()],
    }
    texts = {"table.csv": as_csv(cells, verdict), PAGE: templates().get_template("report.html.j2").render(facts)}
    for name, language in REPORTS.items():
        texts[name] = templates().get_template("report.md.j2").render(facts, language=language)
    for name, text in texts.items():
        with atomic_write(folder / name, "w") as file:
            file.write(text)


def describe_departure(departure: Departure) -> str:
    """Return a clause that says what differs, at which step and by how much."""
    return str(templates().get_template("en.j2").module.departure(departure))  # type: ignore[attr-defined]


@cache
def templates() -> jinja2.Environment:
    """Return the templates of this folder, with the filters that write figures."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - Markdown; the page escapes by the filters inline and escape
    )
    for name in ("percent", "speed", "size", "small", "number"):
        found.filters[name] = getattr(table, name)
    found.filters["escape"] = html.escape
    # HTML of text with Markdown's code and strong words
    found.filters["inline"] = lambda text: re.sub(
        r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    )
    # its text can end neither the column nor the row
    found.filters["cell"] = lambda text: " ".join(text.replace("|", "\\|").split())
    found.tests["word"] = lambda value: isinstance(value, Word)
    found.globals["marks"] = {"good": "✓", "bad": "✗", "note": "–"}
    return found


def _devices(machine: Machine) -> str:
    devices = ", ".join(f"{machine.accelerators.count(name)} x {name}" for name in dict.fromkeys(machine.accelerators))
    return devices or f"{machine.cpu}, {machine.cores} cores"


def _machine(study: Study) -> Table:
    machine = study.machine
    found = {
        "host": machine.host,
        "processor": f"{machine.cpu}, {machine.cores} cores",
        "memory": f"{machine.memory / GIB:.1f} GiB",
        **({"accelerators": _devices(machine)} if machine.accelerators else {}),
        "started": study.started,
        "finished at": study.finished or "–",
    }
    rows = [[Word(name), value] for name, value in found.items()]
    rows += [[name, value] for name, value in study.versions.items()]
    return Table(head=["what", "found"], rows=rows, words=True)


def remarks(study: Study, cells: Mapping[str, Summary], verdict: Verdict) -> list[Remark]:
    """Return the lines of the verdict, most important first."""
    found: list[Remark] = []
    running = [name for name, cell in cells.items() if cell.state in (None, State.FINISHED)]
    if missing := [name for name in running if len(cells[name].result.repeats) < study.repeats]:
        found.append(dict(what="unfinished", mark="note", cells=missing, count=len(cells)))
    found += [line for group in verdict.groups for line in _group(group)]
    found += verdict.rankings
    for state in State:
        failed = [name for name, cell in cells.items() if cell.state is state]
        if state is not State.FINISHED and failed:
            mark = "note" if state is State.REFUSED else "bad"
            found.append(dict(what="no_result", mark=mark, state=state, cells=failed, count=len(cells)))
    if partly := [name for name, cell in cells.items() if cell.runs and cell.failures]:
        found.append(dict(what="some_failed", mark="bad", cells=partly))
    found += _memory(verdict)
    return [*found, verdict.order] if verdict.order else found


def _group(group: GroupVerdict) -> Iterator[Remark]:
    facts = {**vars(group), "group": "" if group.name == "all" else group.name}
    if len(group.same) > 1:
        yield {**facts, "what": "same_losses", "mark": "good"}
    elif not group.different:
        yield {**facts, "what": "not_compared", "mark": "note"}
    for each in group.different[:MAX_LISTED]:
        yield {**facts, **vars(each), "what": "different", "mark": "bad"}
    if left := [each.cell for each in group.different[MAX_LISTED:]]:
        yield {**facts, "what": "different_too", "mark": "bad", "cells": left}


def _memory(verdict: Verdict) -> Iterator[Remark]:
    """Yield one line for each kind of memory that was measured."""
    for kind in dict.fromkeys(check.kind for check in verdict.memory):
        checks = [check for check in verdict.memory if check.kind == kind]
        wrong = sorted((check for check in checks if not check.is_right), key=lambda check: -abs(check.error))
        yield dict(
            what="memory",
            mark="good" if not wrong else "bad" if kind != "resident" else "note",
            kind=kind,
            bound=MEMORY_TOLERANCE,
            right=len(checks) - len(wrong),
            count=len(checks),
            wrong=wrong[:MAX_LISTED],
            more=len(wrong[MAX_LISTED:]),
        )

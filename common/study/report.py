"""Tables, pictures and reports of a study, made from ``study.json``: facts are gathered here, and
worded by the templates.
"""

from __future__ import annotations

import base64
import html
import re
import shlex
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from common.accelerators import GIB
from common.files import atomic_write
from common.study import table
from common.study.drawing import draw
from common.study.results import Machine, Study
from common.study.statistics import CONFIDENCE
from common.study.table import Row, Word, as_csv, main_table, make_table, split_rows
from common.study.verdict import OTHER_KERNELS, Departure, judge
from common.yaml_files import dump_yaml

PAGE = "report.html"
REPORTS = {"report.md": "en", "report_zh.md": "zh"}


def write_outcome(study: Study, folder: Path) -> None:
    """Write tables, pictures and reports of whatever has been found so far into ``folder``.

    Older ones are replaced. Raises StorageError.
    """
    verdict = judge(study)
    pictures = draw(study, verdict, folder)
    failed: list[Row] = [
        {"cell": f"`{name}`", "repeat": str(run.index), "state": Word(run.state), "reason": run.reason}
        for name, cell in verdict.cells.items()
        for run in cell.failures
    ]
    more = {
        "Time of a step": (split_rows(verdict.cells.values()), False),
        "Cells without a result": (failed, True),
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
        "remarks": verdict.remarks,
        "results": main_table(study, verdict),
        "pictures": {name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
        "more": [(title, make_table(rows, words=words)) for title, (rows, words) in more.items() if rows],
        "method": ["how_timed", "how_compared", "how_judged"],
        "machine": _machine(study),
        "blocks": [*blocks.items()],
    }
    texts = {"table.csv": as_csv(verdict), PAGE: templates().get_template("report.html.j2").render(facts)}
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


def _machine(study: Study) -> dict[str, Any]:
    machine = study.machine
    found = {
        "host": machine.host,
        "processor": f"{machine.cpu}, {machine.cores} cores",
        "memory": f"{machine.memory / GIB:.1f} GiB",
        **({"accelerators": _devices(machine)} if machine.accelerators else {}),
        "started": study.started,
        "finished at": study.finished,
    }
    named = {Word(name): value for name, value in found.items()} | study.versions
    return make_table([{"what": name, "found": value} for name, value in named.items()], words=True)

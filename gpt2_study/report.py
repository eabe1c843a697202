"""Tables, pictures and reports of a study, made from ``study.json``: facts are gathered here, and
worded by the templates.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from common.accelerators import GIB
from common.files import atomic_write
from common.planner.plan import three_digits as speed
from common.yaml_files import dump_yaml
from gpt2_study.drawing import draw
from gpt2_study.results import Machine, Study
from gpt2_study.statistics import CONFIDENCE, PARTS, Summary, parts_of, unit_of_bytes
from gpt2_study.verdict import OTHER_KERNELS, Departure, Verdict, judge

PAGE = "report.html"
REPORTS = {"report.md": "en", "report_zh.md": "zh"}
Row = Mapping[str, str | None]


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
    found.filters |= {each.__name__: each for each in (percent, size, small)} | {"speed": speed}
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


# ---- tables ----


class Word(str):
    """A value that a report translates; a head of a table always is."""


def make_table(rows: Sequence[Row], *, marks: Sequence[str] = (), words: bool = False) -> dict[str, Any]:
    """Return a table for the templates, without the columns in which no row has a value.

    Numbers go to the right, the first column to the left. marks: of each row: "bad" where a cell has no result or
    computes something else, else empty. words: True where all columns hold words, which go to the left.
    """
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [[row[name] or "–" for name in head] for row in rows]
    return {"head": head, "rows": cells, "marks": marks, "words": words}


def main_table(study: Study, verdict: Verdict) -> dict[str, Any]:
    """Return what a reader wants first: speed, its spread, speed-up, memory, losses, prediction."""
    cells, different = verdict.cells.values(), verdict.different
    several = [group for group in verdict.groups if len(group["same"]) + len(group["different"]) > 1]
    compared = {name for group in several for name in group["same"]}
    many_hosts = any(cell.cell.hosts > 1 for cell in cells)
    rows = [
        {
            "cell": f"`{cell.id}`",
            "ranks": str(cell.cell.ranks),
            "hosts": str(cell.cell.hosts) if many_hosts else None,
            "tokens/s": _text(speed, cell.tokens_per_second),
            "lowest to highest": (
                "–".join(speed(end(cell.speeds.values())) for end in (min, max)) if len(cell.speeds) > 1 else None
            ),
            "speed-up": _text("{:.2f}".format, cell.speed_up),
            "efficiency": _text(percent, cell.efficiency),
            "a step": _text(seconds, cell.step_seconds),
            "memory a rank": size(max(cell.peak_memory)) if any(cell.peak_memory) else None,
            "MFU": _text(percent, cell.mfu),
            "last loss": f"{cell.first.loss[-1]:.4f}" if cell.first and cell.first.loss else None,
            "same losses": (Word("**no**") if cell.id in different else Word("yes") if cell.id in compared else None),
            "memory of tensors": _text(size, cell.counted_memory),
            "planned memory": _text(size, max(cell.planned.peak, default=None)),
            "planned step": _text(seconds, cell.planned.step_seconds),
            "repeats": f"{len(cell.runs)}/{study.repeats}" if cell.runs else Word(cell.state or "not run yet"),
        }
        for cell in cells
    ]
    return make_table(rows, marks=["bad" if cell.id in different or not cell.speeds else "" for cell in cells])


def split_rows(cells: Iterable[Summary]) -> list[Row]:
    """Return where the time of a step goes; no rows where runs tell fewer than two parts."""
    split = [cell for cell in cells if cell.split]
    parts = parts_of(split)
    return [
        {"cell": f"`{cell.id}`"}
        | {PARTS.get(part, part): _text(seconds, cell.split.get(part)) for part in parts}
        | {"a step": _text(seconds, cell.step_seconds)}
        for cell in split
        if len(parts) > 1
    ]


def _text(shown: Callable[[float], str], value: float | None) -> str | None:
    return None if value is None else shown(value)


# ---- CSV ----


def as_csv(verdict: Verdict) -> str:
    """Return every figure of every cell in base units, without rounding. Empty: not known."""
    rows = [_flat(cell, verdict) for cell in verdict.cells.values()]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*dict.fromkeys(name for row in rows for name in row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(found: Summary, verdict: Verdict) -> dict[str, object]:
    cell, expected, first = found.cell, found.planned, found.first
    departure = verdict.different.get(cell.id)
    return {
        "cell": cell.id,
        **{f"axis:{axis}": text for axis, text in cell.axes.items()},
        "backend": cell.backend,
        "engine": cell.engine,
        "peer": cell.peer,
        "ranks": cell.ranks,
        "hosts": cell.hosts,
        "state": found.state or "not run yet",
        "repeats_finished": len(found.runs),
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_lowest": min(found.speeds.values(), default=None),
        "tokens_per_second_highest": max(found.speeds.values(), default=None),
        "samples_per_second": found.samples_per_second,
        "step_seconds": found.step_seconds,
        "first_step_seconds": first and first.first_step_seconds,
        **{f"split:{part}": value for part, value in found.split.items()},
        "speed_up": found.speed_up,
        "efficiency": found.efficiency,
        "baseline": cell.baseline,
        "peak_memory_bytes": max(found.peak_memory, default=None),
        "counted_memory_bytes": found.counted_memory,
        "mfu": found.mfu,
        "last_loss": first.loss[-1] if first and first.loss else None,
        "last_gradient_norm": first.gradient_norm[-1] if first and first.gradient_norm else None,
        "validation_loss": first and first.validation_loss,
        "group": cell.group,
        "differs_in": departure and departure.kind,
        "differs_from_step": (departure and departure.step) or None,
        "predicted_memory_bytes": max(expected.peak, default=None),
        "predicted_step_seconds": expected.step_seconds,
        "reason": found.failures[-1].reason if found.failures else expected.reason,
    }


# ---- figures as text ----


def percent(value: float, signed: bool = False) -> str:
    """Return ``12 %``, ``1.2 %`` or ``0.12 %``: two digits that say something."""
    size = abs(100 * value)
    digits = 0 if size >= 9.95 or not size else min(3, 1 - math.floor(math.log10(size)))
    return f"{100 * value:{'+' if signed else ''},.{digits}f} %"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def size(value: float) -> str:
    """Return bytes in GiB or MiB, three digits."""
    unit, name = unit_of_bytes(value)
    return f"{speed(value / unit)} {name}"


def small(value: float) -> str:
    """Return a relative difference such as ``3.1e-08``; 0 is exact."""
    return f"{value:.1e}" if value else "0"

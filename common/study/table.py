"""The tables of a study, one row a cell, for reading and as CSV; and figures as text."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.accelerators import GIB
from common.study.results import Study
from common.study.statistics import Summary
from common.study.verdict import Verdict

MIB = 2**20
PARTS = {"forward_backward": "forward and backward"}
"""Parts of a step whose names say too little."""


class Word(str):
    """A value that a report translates; a head of a table always is."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Heads and rows of equal length. Numbers go to the right, the first column to the left."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: Sequence[str] = ()
    """Mark of each row: "bad" where a cell has no result or computes something else, else empty."""
    words: bool = False
    """True where all columns hold words, which go to the left."""


Column = Callable[[Summary], str | None]
"""The value of a cell; a column of None is left out."""


def main_table(study: Study, cells: Mapping[str, Summary], verdict: Verdict) -> Table:
    """Return what a reader wants first: speed, its spread, speed-up, memory, losses, prediction."""
    different = verdict.different
    compared = {name for group in verdict.groups if group.is_comparison for name in group.same}
    many_hosts = any(cell.result.cell.hosts > 1 for cell in cells.values())

    def same(cell: Summary) -> str | None:
        if cell.id in different:
            return Word("**no**")
        return Word("yes") if cell.id in compared else None

    def runs(cell: Summary) -> str:
        return f"{len(cell.runs)}/{study.repeats}" if cell.runs else Word(cell.state or "not run yet")

    def spread(cell: Summary) -> str | None:
        if len(cell.speeds) < 2:
            return None
        return f"{speed(cell.lowest or 0)}–{speed(cell.highest or 0)}"

    def loss(cell: Summary) -> str | None:
        losses = cell.first.loss if cell.first else []
        return f"{losses[-1]:.4f}" if losses else None

    columns: dict[str, Column] = {
        "ranks": lambda cell: f"{cell.result.cell.ranks}",
        "hosts": lambda cell: f"{cell.result.cell.hosts}" if many_hosts else None,
        "tokens/s": _shown(speed, "tokens_per_second"),
        "lowest to highest": spread,
        "speed-up": _shown("{:.2f}".format, "speed_up"),
        "efficiency": _shown(percent, "efficiency"),
        "a step": _shown(seconds, "step_seconds"),
        "memory a rank": lambda cell: size(max(cell.peak_memory)) if any(cell.peak_memory) else None,
        "MFU": _shown(percent, "mfu"),
        "last loss": loss,
        "same losses": same,
        "memory of tensors": _shown(size, "counted_memory"),
        "planned memory": lambda cell: size(max(cell.planned.peak)) if cell.planned.peak else None,
        "planned step": lambda cell: seconds(cell.planned.step_seconds) if cell.planned.step_seconds else None,
        "repeats": runs,
    }
    marks = ["bad" if cell.id in different or not cell.speeds else "" for cell in cells.values()]
    return _table(columns, cells.values(), marks)


def _shown(text: Callable[[float], str], name: str) -> Column:
    def value(cell: Summary) -> str | None:
        found = getattr(cell, name)
        return None if found is None else text(found)

    return value


def split_table(cells: Mapping[str, Summary]) -> Table | None:
    """Return where the time of a step goes, or None where runs tell fewer than two parts."""
    parts = parts_of(cells.values())
    if len(parts) < 2:
        return None

    def column(part: str) -> Column:
        return lambda cell: seconds(cell.split[part]) if part in cell.split else None

    columns = {PARTS.get(part, part): column(part) for part in parts}
    columns["a step"] = _shown(seconds, "step_seconds")
    return _table(columns, [cell for cell in cells.values() if cell.split])


def parts_of(cells: Iterable[Summary]) -> list[str]:
    """Return the parts of a step that take time in any cell, in one order for all studies."""
    splits = [cell.split for cell in cells]
    parts = dict.fromkeys(part for split in splits for part in split)
    return [part for part in parts if any(split.get(part) for split in splits)]


def _table(columns: Mapping[str, Column], cells: Iterable[Summary], marks: Sequence[str] = ()) -> Table:
    rows = [[f"`{cell.id}`", *(value(cell) for value in columns.values())] for cell in cells]
    kept = [place for place in range(len(columns) + 1) if any(row[place] for row in rows)]
    head = ["cell", *columns]
    return Table(
        head=[head[place] for place in kept], rows=[[row[place] or "–" for place in kept] for row in rows], marks=marks
    )


# ---- CSV ----


def as_csv(cells: Mapping[str, Summary], verdict: Verdict) -> str:
    """Return every figure of every cell in base units, without rounding. Empty: not known."""
    rows = [_flat(cell, verdict) for cell in cells.values()]
    head = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(head), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(found: Summary, verdict: Verdict) -> dict[str, object]:
    cell, expected, first = found.result.cell, found.planned, found.first
    different = verdict.different.get(cell.id)
    failed = next((run for run in reversed(found.failures)), None)
    return {
        "cell": cell.id,
        **{f"axis:{axis}": text for axis, text in cell.axes.items()},
        "backend": cell.backend,
        "engine": cell.engine,
        "peer": cell.peer or "",
        "ranks": cell.ranks,
        "hosts": cell.hosts,
        "state": found.state or "not run yet",
        "repeats_finished": len(found.runs),
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_second_lowest": found.lowest,
        "tokens_per_second_highest": found.highest,
        "samples_per_second": found.samples_per_second,
        "step_seconds": found.step_seconds,
        "first_step_seconds": first.first_step_seconds if first else None,
        **{f"split:{part}": value for part, value in found.split.items()},
        "speed_up": found.speed_up,
        "efficiency": found.efficiency,
        "baseline": cell.baseline or "",
        "peak_memory_bytes": max(found.peak_memory, default=None),
        "counted_memory_bytes": found.counted_memory,
        "mfu": found.mfu,
        "last_loss": first.loss[-1] if first and first.loss else None,
        "last_gradient_norm": (first.gradient_norm[-1] if first and first.gradient_norm else None),
        "validation_loss": first.validation_loss if first else None,
        "group": cell.group or "",
        "differs_in": different.departure.kind if different else "",
        "differs_from_step": (different.departure.step or "") if different else "",
        "predicted_memory_bytes": max(expected.peak, default=None),
        "predicted_step_seconds": expected.step_seconds,
        "reason": failed.reason if failed else expected.reason,
    }


# ---- figures as text ----


def percent(value: float, signed: bool = False) -> str:
    """Return ``12 %``, ``1.2 %`` or ``0.12 %``: two digits that say something."""
    size = abs(100 * value)
    digits = 0 if size >= 9.95 or not size else min(3, 1 - math.floor(math.log10(size)))
    return f"{100 * value:{'+' if signed else ''},.{digits}f} %"


def speed(value: float) -> str:
    """Return tokens or samples a second, with three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def size(value: float) -> str:
    """Return bytes in GiB or MiB, three digits."""
    unit, name = (GIB, "GiB") if value >= GIB else (MIB, "MiB")
    return f"{speed(value / unit)} {name}"


def small(value: float) -> str:
    """Return a relative difference such as ``3.1e-08``; 0 is exact."""
    return f"{value:.1e}" if value else "0"


def number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.7g}"

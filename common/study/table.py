"""The tables of a study: one row a cell, for reading and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.study.results import State, Study
from common.study.statistics import Summary
from common.study.verdict import Verdict
from common.study.words import (
    DATA_PARALLEL,
    PARTS,
    STATES,
    Text,
    both,
    percent,
    seconds,
    size,
    speed,
)

DASH = both("–")
SAME = {
    True: Text("yes", "是"),
    False: Text("**no**", "**否**"),
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Heads and rows of equal length. Numbers go to the right, the first column to the left."""

    head: tuple[Text, ...]
    rows: tuple[tuple[Text, ...], ...]
    marks: tuple[str, ...] = ()
    """Mark of each row: "bad" where a cell has no result or computes something else, else empty."""
    words: bool = False
    """True where all columns hold words, which go to the left."""


@dataclass(frozen=True, kw_only=True)
class Column:
    head: Text
    value: Callable[[Summary], str | Text | None]
    """None where a cell has no such value; a column of None is left out."""


def main_table(study: Study, cells: Mapping[str, Summary], verdict: Verdict) -> Table:
    """Return what a reader wants first: speed, its spread, speed-up, memory, losses, prediction."""
    different = verdict.different
    compared = {name for group in verdict.groups if group.is_comparison for name in group.same}

    def same(cell: Summary) -> Text | None:
        if cell.id in different:
            return SAME[False]
        return SAME[True] if cell.id in compared else None

    def runs(cell: Summary) -> Text:
        if study.calculated:
            if cell.tokens_per_second:
                return Text("calculated", "计算值")
            too_large = bool(cell.peak_memory) and not cell.fits
            return Text("does not fit", "内存不足") if too_large else STATES[State.REFUSED]
        if cell.runs:
            return both(f"{len(cell.runs)}/{study.repeats}")
        return STATES[cell.state]

    many_hosts = any(cell.result.cell.hosts > 1 for cell in cells.values())
    columns = [
        Column(head=Text("cell", "配置"), value=lambda cell: f"`{cell.id}`"),
        Column(head=Text("ranks", "进程"), value=lambda cell: f"{cell.result.cell.ranks}"),
        Column(
            head=Text("hosts", "主机"),
            value=lambda cell: f"{cell.result.cell.hosts}" if many_hosts else None,
        ),
        Column(head=Text("tokens/s", "tokens/s"), value=_shown(speed, "tokens_per_second")),
        Column(
            head=Text("lowest to highest", "最低–最高"),
            value=lambda cell: (
                f"{speed(cell.lowest or 0)}–{speed(cell.highest or 0)}"
                if len(cell.speeds) > 1
                else None
            ),
        ),
        Column(
            head=Text("speed-up", "加速比"),
            value=lambda cell: None if cell.speed_up is None else f"{cell.speed_up:.2f}",
        ),
        Column(head=Text("efficiency", "效率"), value=_shown(percent, "efficiency")),
        Column(head=Text("a step", "每步"), value=_shown(seconds, "step_seconds")),
        Column(
            head=Text("memory a rank", "单进程内存"),
            value=lambda cell: size(max(cell.peak_memory)) if any(cell.peak_memory) else None,
        ),
        Column(head=Text("MFU", "MFU"), value=_shown(percent, "mfu")),
        Column(head=Text("last loss", "末步损失"), value=_last_loss),
        Column(head=Text("same losses", "损失一致"), value=same),
        *(() if study.calculated else _predicted()),
        Column(head=Text("repeats", "完成"), value=runs),
    ]
    marks = tuple(
        "bad" if cell.id in different or not cell.speeds else "" for cell in cells.values()
    )
    return _table(columns, cells.values(), marks)


def _predicted() -> tuple[Column, ...]:
    def memory(cell: Summary) -> str | None:
        expected = cell.result.prediction
        return size(max(expected.peak)) if expected and expected.peak else None

    def time(cell: Summary) -> str | None:
        expected = cell.result.prediction
        return seconds(expected.step_seconds) if expected and expected.step_seconds else None

    return (
        Column(head=Text("planned memory", "预测内存"), value=memory),
        Column(head=Text("planned step", "预测每步"), value=time),
    )


def _shown(text: Callable[[float], str], name: str) -> Callable[[Summary], str | None]:
    def value(cell: Summary) -> str | None:
        found = getattr(cell, name)
        return None if found is None else text(found)

    return value


def _last_loss(cell: Summary) -> str | None:
    losses = cell.first.loss if cell.first else []
    return f"{losses[-1]:.4f}" if losses else None


def split_table(study: Study, cells: Mapping[str, Summary]) -> Table | None:
    """Return where the time of a step goes, or None where runs tell fewer than two parts."""
    parts = parts_of(cells.values())
    if len(parts) < 2:
        return None

    def column(part: str) -> Column:
        return Column(
            head=part_name(part, study),
            value=lambda cell: seconds(cell.split[part]) if part in cell.split else None,
        )

    return _table(
        [
            Column(head=Text("cell", "配置"), value=lambda cell: f"`{cell.id}`"),
            *map(column, parts),
            Column(head=Text("a step", "每步"), value=_shown(seconds, "step_seconds")),
        ],
        [cell for cell in cells.values() if cell.split],
    )


def parts_of(cells: Iterable[Summary]) -> list[str]:
    """Return the parts of a step that take time in any cell, in one order for all studies."""
    splits = [cell.split for cell in cells]
    parts = dict.fromkeys(part for split in splits for part in split)
    return [part for part in parts if any(split.get(part) for split in splits)]


def part_name(part: str, study: Study) -> Text:
    if part == "data" and study.calculated:
        return DATA_PARALLEL
    return PARTS.get(part, both(part))


def own_table(cells: Mapping[str, Summary]) -> Table | None:
    """Return speeds as the systems of origin define them, or None where no cell has one."""
    figures = dict.fromkeys(name for cell in cells.values() for name in cell.own_figures)
    if not figures:
        return None

    def column(figure: str) -> Column:
        return Column(
            head=both(figure),
            value=lambda cell: (
                f"{cell.own_figures[figure]:,.4g}" if figure in cell.own_figures else None
            ),
        )

    return _table(
        [
            Column(head=Text("cell", "配置"), value=lambda cell: f"`{cell.id}`"),
            *map(column, figures),
        ],
        [cell for cell in cells.values() if cell.own_figures],
    )


def _table(
    columns: Sequence[Column], cells: Iterable[Summary], marks: tuple[str, ...] = ()
) -> Table:
    rows = [[column.value(cell) for column in columns] for cell in cells]
    kept = [
        number for number in range(len(columns)) if any(row[number] is not None for row in rows)
    ]
    return Table(
        head=tuple(columns[number].head for number in kept),
        rows=tuple(tuple(_text(row[number]) for number in kept) for row in rows),
        marks=marks,
    )


def _text(value: str | Text | None) -> Text:
    if value is None:
        return DASH
    return both(value) if isinstance(value, str) else value


# ---- CSV ----


def as_csv(study: Study, cells: Mapping[str, Summary], verdict: Verdict) -> str:
    """Return every figure of every cell in base units, without rounding. Empty: not known."""
    rows = [_flat(study, cell, verdict) for cell in cells.values()]
    head = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(head), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(study: Study, found: Summary, verdict: Verdict) -> dict[str, object]:
    cell, expected, first = found.result.cell, found.result.prediction, found.first
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
        "calculated": study.calculated,
        "state": found.state or ("" if study.calculated else "not run yet"),
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
        "mfu": found.mfu,
        **{f"own:{name}": value for name, value in found.own_figures.items()},
        "last_loss": first.loss[-1] if first and first.loss else None,
        "last_gradient_norm": (first.gradient_norm[-1] if first and first.gradient_norm else None),
        "validation_loss": first.validation_loss if first else None,
        "group": cell.group or "",
        "differs_in": different.departure.kind if different else "",
        "differs_from_step": (different.departure.step or "") if different else "",
        "predicted_memory_bytes": max(expected.peak, default=None) if expected else None,
        "predicted_step_seconds": expected.step_seconds if expected else None,
        "reason": failed.reason if failed else (expected.reason if expected else ""),
    }

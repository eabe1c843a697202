"""Result of a comparison of two steps, layer by layer: sentences and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from common.compare.step_records import LayerComparison, Row
from common.files import atomic_write
from common.training.recording import TOKENS

TABLE = "layers.tsv"
_HEAD = ("section", "name", "largest difference", "relative difference", "first place", "sample")
_BEFORE, _AFTER = 3, 6
"""Rows that are printed before and after the first that differs."""


def describe(found: LayerComparison) -> Iterator[str]:
    """Yield the lines that say where two steps begin to differ."""
    compared = f"step {found.step}: {len(found.rows)} tensors, tolerance {found.tolerance:g}"
    for line in found.left_out[:5]:
        yield f"not compared: {line}"
    if len(found.left_out) > 5:
        yield f"not compared: {len(found.left_out) - 5} more"
    row = found.first
    if row is None:
        largest = max((each.relative for each in found.rows), default=0.0)
        yield f"{compared}: no difference; the largest relative one is {largest:.2g}"
        return
    beyond = sum(each.differs for each in found.rows)
    yield f"{compared}: {beyond} differ"
    yield from table(found.rows, found.rows.index(row))
    yield f"first difference: {row.title()}{_where(found, row)}"


def table(rows: Sequence[Row], first: int) -> Iterator[str]:
    """Yield the rows around the first difference, aligned."""
    start, end = max(0, first - _BEFORE), first + _AFTER + 1
    lines = [_HEAD, *map(_cells, rows[start:end])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()
    rest = len(rows) - end
    if rest > 0:
        yield f"... and {rest} more rows"


def write_table(found: LayerComparison, path: Path) -> None:
    """Write all rows, separated by tabs. Raises OSError."""
    with atomic_write(path, "w") as file:
        for cells in (_HEAD, *map(_cells, found.rows)):
            file.write("\t".join(cells) + "\n")


def _where(found: LayerComparison, row: Row) -> str:
    parts = []
    if row.sample is not None and row.place is not None:
        names = ("token",) if row.section == TOKENS else ("token", "channel")
        inner = ", ".join(f"{name} {index}" for name, index in zip(names, row.place[1:], strict=True))
        parts.append(f"from sample {row.sample} of the batch on, {inner}")
        if row.sample in found.ranks and max(found.ranks[row.sample]):
            one, other = found.ranks[row.sample]
            parts.append(f"which rank {one} of A and rank {other} of B read")
    relative = f"; relative {row.relative:.2g}, largest {row.largest:.2g}"
    return (f" ({'; '.join(parts)})" if parts else "") + relative


def _cells(row: Row) -> tuple[str, ...]:
    place = "-" if row.place is None else ",".join(map(str, row.place))
    sample = "-" if row.sample is None else str(row.sample)
    relative, largest = f"{row.relative:.3g}", f"{row.largest:.3g}"
    return (row.section, row.name or "-", largest, relative, place, sample)

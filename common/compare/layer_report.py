"""Result of a comparison of two steps, layer by layer: sentences, a table, and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.compare.step_records import LayerComparison, Row
from common.files import atomic_write
from common.training.plot import open_pyplot
from common.training.recording import BACKWARD, FORWARD, GRADIENTS, TOKENS, WEIGHTS

TABLE, PICTURE = "layers.tsv", "layers.png"
_HEAD = ("section", "name", "largest difference", "relative difference", "first place", "sample")
_BEFORE, _AFTER = 3, 6
"""Rows that are printed before and after the first that differs."""
_LEAST = 1e-9
"""Relative differences below are drawn as this one: zero has no place on a logarithmic axis."""


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


def draw(found: LayerComparison, path: Path, names: tuple[str, str]) -> None:
    """Draw the relative differences in the order of the forward and of the backward pass.

    Raises OSError.
    """
    pyplot = open_pyplot()
    figure, panels = pyplot.subplots(2, figsize=(11, 7.5), layout="constrained")
    forward = list(_without_equal_weights(found))
    backward = [row for row in found.rows if row.section in (BACKWARD, GRADIENTS)]
    _draw_panel(panels[0], found, forward, "forward pass: tokens, weights, outputs of layers")
    _draw_panel(panels[1], found, backward, "backward pass: gradients, from the last layer on")
    panels[0].legend(frameon=False, fontsize="small", loc="upper left", ncols=4)
    panels[1].legend(frameon=False, fontsize="small", loc="upper left", ncols=4)
    figure.suptitle(f"step {found.step}: {names[0]} and {names[1]}", fontsize="medium")
    with atomic_write(path) as file:
        figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)


def _without_equal_weights(found: LayerComparison) -> Iterator[Row]:
    """Yield the rows of the forward pass. Of the weights before the step all that differ, or else
    the one that differs most.
    """
    weights = [row for row in found.rows if row.section == WEIGHTS]
    shown = [row for row in weights if row.differs]
    shown = shown or sorted(weights, key=lambda row: row.relative)[-1:]
    yield from (row for row in found.rows if row.section == TOKENS)
    yield from shown
    yield from (row for row in found.rows if row.section == FORWARD)


_LOOKS = {
    TOKENS: ("tokens", "#444444", "s"),
    WEIGHTS: ("weights before the step", "#9a9a9a", "."),
    FORWARD: ("outputs", "#1f5a94", "o"),
    BACKWARD: ("gradients of outputs", "#1f5a94", "o"),
    GRADIENTS: ("gradients of parameters", "#c4501b", "."),
}


def _draw_panel(axes: Any, found: LayerComparison, rows: Sequence[Row], title: str) -> None:
    heights = [_height(row, found.tolerance) for row in rows]
    for section in dict.fromkeys(row.section for row in rows):
        label, color, marker = _LOOKS[section]
        points = [place for place, row in enumerate(rows) if row.section == section]
        axes.plot(
            points,
            [heights[place] for place in points],
            color=color,
            marker=marker,
            markersize=4,
            linewidth=0.8 if section in (FORWARD, BACKWARD) else 0,
            label=label,
        )
    axes.axhline(found.tolerance, color="#777777", linestyle="--", linewidth=0.8, label="tolerance")
    first = found.first
    if first is not None and first in rows:
        place = rows.index(first)
        left = place < len(rows) / 2
        axes.plot([place], [heights[place]], "o", markersize=12, fillstyle="none", color="#b00020")
        axes.annotate(
            first.title(),
            (place, heights[place]),
            xytext=(12 if left else -12, 12),
            textcoords="offset points",
            ha="left" if left else "right",
            color="#b00020",
            fontsize="small",
        )
    ticks = list(_ticks(rows))
    axes.set_xticks(
        [place for place, _ in ticks],
        [name for _, name in ticks],
        fontsize="small",
        rotation=40,
        ha="right",
        rotation_mode="anchor",
    )
    top = max([found.tolerance, *heights])
    axes.set(yscale="log", ylabel="relative difference", title=title, ylim=(_LEAST / 3, top * 300))
    axes.grid(alpha=0.25)


def _height(row: Row, tolerance: float) -> float:
    """Return the height of a row; what is not finite is drawn as a difference of one."""
    return max(row.relative, _LEAST) if math.isfinite(row.relative) else max(1.0, tolerance)


def _ticks(rows: Sequence[Row]) -> Iterator[tuple[int, str]]:
    """Yield where each layer begins, at most some 32 of them, and its name."""
    found: list[tuple[int, str]] = []
    before = ""
    for place, row in enumerate(rows):
        layer = ".".join(row.name.split(".")[:2]) if row.name.startswith("h.") else row.name
        layer = layer.removesuffix(".weight").removesuffix(".bias")
        if row.section == WEIGHTS:
            layer = "weights"
        if layer and layer != before:
            found.append((place, layer))
        before = layer
    yield from found[:: 1 + len(found) // 32]


def _where(found: LayerComparison, row: Row) -> str:
    parts = []
    if row.sample is not None and row.place is not None:
        names = ("token",) if row.section == TOKENS else ("token", "channel")
        inner = ", ".join(
            f"{name} {index}" for name, index in zip(names, row.place[1:], strict=True)
        )
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

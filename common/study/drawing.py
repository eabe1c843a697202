"""The figures of a study as PNG files, drawn with matplotlib; a function returns None where there
is nothing to draw. Their words are English and their labels ASCII, so that any font has them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.accelerators import GIB
from common.files import atomic_write
from common.study.results import Study
from common.study.same_losses import relative_difference
from common.study.statistics import Summary
from common.study.table import MIB, part_name, parts_of
from common.study.verdict import MEMORY_TOLERANCE, Verdict
from common.training.plot import open_pyplot

FOLDER = "plots"
_DPI = 110
_COLORS = 200
_MAX_BARS = 60
_MAX_CURVES = 30
_MAX_LABEL = 38
_BLUE, _DARK, _RED, _GREY = "#7fa8d1", "#1f5a94", "#c4501b", "#6b7280"
_STEP_TIME = "step time (s)"
_MEMORY = {
    "state": "weights and optimizer",
    "step": "gradients and activations",
    "peak": "peak of the fullest rank",
    "resident": "resident memory",
}
_FLOOR = 1e-9
"""Relative differences below it are drawn as none."""


class Sheet(NamedTuple):
    """A study to draw, and pyplot to draw it with."""

    study: Study
    cells: Sequence[Summary]
    verdict: Verdict
    pyplot: Any

    def bars(self, cells: Sequence[Summary], width: float = 9.0) -> tuple[Any, Any]:
        figure, axes = self.pyplot.subplots(
            figsize=(width, 1.1 + 0.27 * max(2, len(cells))), layout="constrained"
        )
        _name_rows(axes, cells)
        return figure, axes


def draw_throughput(sheet: Sheet) -> Any:
    cells = [cell for cell in sheet.cells if cell.tokens_per_second][:_MAX_BARS]
    if not cells:
        return None
    figure, axes = sheet.bars(cells)
    _bar(axes, sheet, [cell.tokens_per_second or 0 for cell in cells])
    for row, cell in enumerate(cells):
        if len(cell.speeds) > 1:
            axes.plot([cell.lowest, cell.highest], [row, row], color=_DARK, linewidth=1.4, zorder=3)
        _strokes(axes, row, list(cell.speeds.values()))
    calculated = ", calculated" if sheet.study.calculated else ""
    axes.set(xlabel=f"tokens per second{calculated}", xlim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def draw_efficiency(sheet: Sheet) -> Any:
    cells = [cell for cell in sheet.cells if cell.speed_up is not None][:_MAX_BARS]
    if len(cells) < 2:
        return None
    by_id = {cell.id: cell for cell in sheet.cells}
    ratios = [
        cell.result.cell.ranks / by_id[cell.result.cell.baseline or ""].result.cell.ranks
        for cell in cells
    ]
    scales = len(set(ratios)) > 1
    figure, panels = sheet.pyplot.subplots(
        1,
        1 + scales,
        figsize=(9.0 + 1.5 * scales, max(3.2 if scales else 0, 1.1 + 0.27 * len(cells))),
        squeeze=False,
        layout="constrained",
    )
    right = panels[0][-1]
    _name_rows(right, cells)
    _bar(right, sheet, [cell.efficiency or 0 for cell in cells])
    right.axvline(1, color=_RED, linestyle="--", linewidth=1.2, label="ideal")
    right.set(xlabel="efficiency: speed-up by ratio of ranks", xlim=(0, None))
    right.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    if scales:
        left = panels[0][0]
        ideal = [min(ratios), max(ratios)]
        left.plot(ideal, ideal, color=_RED, linestyle="--", linewidth=1.2, label="ideal")
        left.plot(
            ratios, [cell.speed_up for cell in cells], "o", color=_DARK, alpha=0.7, markersize=6
        )
        left.set(xlabel="ranks by the baseline's", ylabel="speed-up")
        speed_ups = [cell.speed_up or 1 for cell in cells]
        lowest, highest = min(*speed_ups, *ratios), max(*speed_ups, *ratios)
        doubles = range(math.floor(math.log2(lowest)), math.ceil(math.log2(highest)) + 1)
        _log_scales(left, sorted(set(ratios)), [2.0**power for power in doubles])
        left.grid(alpha=0.25)
        left.legend(frameon=False)
    return figure


def draw_memory(sheet: Sheet) -> Any:
    cells = [cell for cell in sheet.cells if any(cell.peak_memory)][:_MAX_BARS]
    if not cells:
        return None
    unit, name = _unit([max(cell.peak_memory) for cell in cells])
    figure, axes = sheet.bars(cells)
    _bar(axes, sheet, [max(cell.peak_memory) / unit for cell in cells])
    expected: list[tuple[float, int]] = []
    for row, cell in enumerate(cells):
        _strokes(axes, row, [value / unit for value in cell.peak_memory])
        if cell.planned.peak and not sheet.study.calculated:
            expected.append((max(cell.planned.peak) / unit, row))
    if expected:
        axes.plot(
            *zip(*expected, strict=True), "D", color=_RED, markersize=5, zorder=4, clip_on=False,
            label="planned, fullest rank",
        )  # fmt: skip
        figure.legend(loc="outside upper right", frameon=False, fontsize="small")
    source = next((cell.first.peak_memory_source for cell in cells if cell.first), "")
    label = f"peak memory of a rank ({name}{', ' + source if source else ''})"
    axes.set(xlabel=label.encode("ascii", "replace").decode(), xlim=(0, None))
    return figure


def draw_split(sheet: Sheet) -> Any:
    cells = [cell for cell in sheet.cells if any(cell.split.values())][:_MAX_BARS]
    parts = parts_of(cells)
    if len(parts) < 2:
        return None
    figure, axes = sheet.bars(cells)
    unit, name = (1, "s") if max(sum(cell.split.values()) for cell in cells) >= 1 else (1e-3, "ms")
    starts = [0.0] * len(cells)
    for number, part in enumerate(parts):
        widths = [cell.split.get(part, 0.0) / unit for cell in cells]
        axes.barh(
            range(len(cells)), widths, left=starts, height=0.62, color=f"C{number}", alpha=0.8,
            label=part_name(part, sheet.study),
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set(xlabel=f"{name} a step", xlim=(0, None))
    figure.legend(
        loc="outside upper right", ncols=min(4, len(parts)), frameon=False, fontsize="small"
    )
    return figure


def draw_loss(sheet: Sheet) -> Any:
    rows = [(cell, cell.first.loss) for cell in sheet.cells if cell.first and cell.first.loss]
    rows.sort(key=lambda row: row[0].id in sheet.verdict.different)  # on top of the others
    return _curves(sheet, rows, "loss (nats per token)", nested=True)


def draw_difference(sheet: Sheet) -> Any:
    by_id = {cell.id: cell for cell in sheet.cells}
    rows: list[tuple[Summary, list[float]]] = []
    tolerances = set()
    for group in sheet.verdict.groups:
        reference = by_id[group.reference].first
        assert reference is not None
        others = {*group.same, *(each.cell for each in group.different)} - {group.reference}
        for cell in sheet.cells:
            if cell.id in others and cell.first:
                tolerances.add(group.tolerance)
                pairs = zip(cell.first.loss, reference.loss, strict=False)
                rows.append((cell, [relative_difference(*pair) for pair in pairs]))
    if not rows:
        return None
    figure = _curves(sheet, rows, "loss: difference to the reference, relative")
    axes = figure.axes[0]
    axes.set_yscale("symlog", linthresh=_FLOOR, linscale=0.4)
    values = [value for _, row in rows for value in row if math.isfinite(value)]
    top = max([*values, *tolerances, _FLOOR])
    powers = range(-9, math.ceil(math.log10(top)) + 1)
    axes.set_yticks([0.0, *(10.0**power for power in powers)])
    axes.set_ylim(-_FLOOR / 4, 2 * 10.0 ** powers[-1])
    for tolerance in tolerances:
        axes.axhline(tolerance, color=_RED, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"tolerance {tolerance:g}", (0.99, tolerance), xycoords=("axes fraction", "data"),
            ha="right", va="bottom", fontsize="small", color=_RED,
        )  # fmt: skip
    return figure


def draw_prediction(sheet: Sheet) -> Any:
    if sheet.study.calculated:
        return None
    kinds = dict.fromkeys(check.kind for check in sheet.verdict.memory)
    times = [
        (cell.step_seconds, cell.planned.step_seconds)
        for cell in sheet.cells
        if cell.step_seconds and cell.planned.step_seconds
    ]
    panels: list[tuple[str, list[tuple[float, float]]]] = []
    for kind in kinds:
        checks = [check for check in sheet.verdict.memory if check.kind == kind]
        unit, name = _unit([check.measured for check in checks])
        scaled = [(check.measured / unit, check.predicted / unit) for check in checks]
        panels.append((f"{_MEMORY[kind]} ({name})", scaled))
    if times:
        panels.append((_STEP_TIME, times))
    if not panels:
        return None
    figure, grid = sheet.pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 4.2), squeeze=False, layout="constrained"
    )
    for axes, (what, points) in zip(grid[0], panels, strict=True):
        ends = [0.8 * min(map(min, points)), 1.25 * max(map(max, points))]
        axes.plot(ends, ends, color=_GREY, linestyle="--", linewidth=1, label="as planned")
        low, high = ([factor * end for end in ends] for factor in (0.9, 1.1))
        if what != _STEP_TIME:
            axes.fill_between(
                ends, low, high, color=_GREY, alpha=0.15, linewidth=0,
                label=f"within {MEMORY_TOLERANCE:.0%}",
            )  # fmt: skip
        axes.plot(*zip(*points, strict=True), "o", color=_DARK, alpha=0.7, markersize=6)
        axes.set(title=what, xlabel="measured", ylabel="planned", xlim=ends, ylim=ends)
        if ends[1] > 4 * ends[0]:
            _log_scales(axes, _ticks(*ends), _ticks(*ends))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    return figure


PICTURES = {
    "throughput": draw_throughput,
    "efficiency": draw_efficiency,
    "split": draw_split,
    "memory": draw_memory,
    "loss": draw_loss,
    "loss_difference": draw_difference,
    "prediction": draw_prediction,
}
"""Names of the files, in the order of a report. Their titles are in the templates."""


def draw(study: Study, cells: Mapping[str, Summary], verdict: Verdict, folder: Path) -> list[str]:
    """Draw all pictures that the study has figures for into ``folder/plots``; older ones go.

    Return their names. Raises StorageError.
    """
    sheet = Sheet(study, list(cells.values()), verdict, open_pyplot())
    drawn = []
    for name, plot in PICTURES.items():
        path = folder / FOLDER / f"{name}.png"
        figure = plot(sheet)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        with atomic_write(path) as file:
            file.write(_png(figure))
        sheet.pyplot.close(figure)
        drawn.append(name)
    return drawn


def _png(figure: Any) -> bytes:
    """Return the figure as a PNG of few colours, a third of matplotlib's bytes."""
    from PIL import Image  # comes with matplotlib

    whole, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(whole, dpi=_DPI, format="png")
    Image.open(whole).convert("RGB").quantize(_COLORS).save(reduced, "PNG", optimize=True)
    return reduced.getvalue()


# ---- parts of pictures ----


def _name_rows(axes: Any, cells: Sequence[Summary]) -> None:
    axes.set_yticks(range(len(cells)), [_label(cell.id) for cell in cells], fontsize="small")
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _bar(axes: Any, sheet: Sheet, values: Sequence[float]) -> None:
    hatch = "///" if sheet.study.calculated else None
    axes.barh(
        range(len(values)), values, height=0.62, color=_BLUE, hatch=hatch, edgecolor="white",
        linewidth=0,
    )  # fmt: skip


def _strokes(axes: Any, row: int, values: Sequence[float]) -> None:
    """Mark several values on the bar of a row."""
    if len(values) > 1:
        axes.plot(values, [row] * len(values), "|", color=_DARK, markersize=8, zorder=4)


def _log_scales(axes: Any, across: Sequence[float], up: Sequence[float]) -> None:
    """Make both scales logarithmic, with these ticks as plain numbers."""
    axes.set(xscale="log", yscale="log")
    for axis, ticks in ((axes.xaxis, across), (axes.yaxis, up)):
        axis.set_ticks(ticks)
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def _curves(
    sheet: Sheet,
    rows: Sequence[tuple[Summary, Sequence[float]]],
    label: str,
    *,
    nested: bool = False,
) -> Any:
    """Draw one curve a row over steps. nested: earlier ones wider, so that equal ones all show."""
    rows = rows[:_MAX_CURVES]
    if not rows:
        return None
    figure, axes = sheet.pyplot.subplots(
        figsize=(9.0, max(4.0, 0.6 + 0.19 * len(rows))), layout="constrained"
    )
    colors = sheet.pyplot.get_cmap("turbo" if len(rows) > 10 else "tab10")
    for number, (cell, values) in enumerate(rows):
        color = colors(number / (len(rows) - 1) if len(rows) > 10 else number)
        back = len(rows) - 1 - number
        width = 1.3 + (min(7.0, 1.6 * back) if len(rows) < 6 else 7.0 * back / len(rows))
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=color,
            linewidth=width if nested else 1.4,
            solid_capstyle="butt",
            marker="o" if len(values) == 1 else None,
            label=_label(cell.id),
        )
        broken = [step for step, value in enumerate(values, 1) if not math.isfinite(value)]
        if broken:
            axes.plot(
                broken, [0.97] * len(broken), "x", color=color, markersize=8, clip_on=False,
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    axes.set(xlabel="step", ylabel=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _label(name: str) -> str:
    """Return a name that fits beside a picture: a long one loses its middle."""
    if len(name) <= _MAX_LABEL:
        return name
    half = (_MAX_LABEL - 2) // 2
    return f"{name[:half]}..{name[-half:]}"


def _unit(values: Sequence[float]) -> tuple[int, str]:
    return (GIB, "GiB") if max(values, default=0) >= GIB else (MIB, "MiB")


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between both ends, at most about six."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1,)):
        ticks = [d * 10.0**power for power in powers for d in digits]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= 6:
            return inside
    return inside

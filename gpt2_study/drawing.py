"""The figures of a study as PNG files, drawn with matplotlib; a function returns None where there
is nothing to draw. Their words are English and their labels ASCII, so that any font has them.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import atomic_write
from common.training.plot import open_pyplot
from gpt2_study.results import Study
from gpt2_study.statistics import PARTS, Summary, parts_of, unit_of_bytes
from gpt2_study.verdict import Verdict, relative_difference

FOLDER = "plots"
_DPI = 110
_COLORS = 200
_MAX_BARS = 60
_MAX_CURVES = 30
_MAX_LABEL = 38
_BLUE, _DARK, _RED = "#7fa8d1", "#1f5a94", "#c4501b"
_FLOOR = 1e-9
"""Relative differences below it are drawn as none."""


def _label(name: str) -> str:
    """Return a name that fits beside a picture: a long one loses its middle."""
    half = (_MAX_LABEL - 2) // 2
    return name if len(name) <= _MAX_LABEL else f"{name[:half]}..{name[-half:]}"


def _rows(cells: Sequence[Summary], bars: Sequence[float] = (), marks: Sequence[Sequence[float]] = ()) -> Any:
    """Return axes with a row for each cell, which have a bar or none. marks: values to mark on each row, where there
    are several.
    """
    size = (9.0, 1.1 + 0.27 * max(2, len(cells)))
    axes = open_pyplot().subplots(figsize=size, layout="constrained")[1]
    axes.set_yticks(range(len(cells)), [_label(cell.id) for cell in cells], fontsize="small")
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if bars:
        axes.barh(range(len(bars)), bars, height=0.62, color=_BLUE, edgecolor="white", linewidth=0)
    for row, values in enumerate(marks):
        if len(values) > 1:
            axes.plot(values, [row] * len(values), "|", color=_DARK, markersize=8, zorder=4)
    return axes


def _legend(axes: Any, columns: int = 1) -> None:
    axes.figure.legend(loc="outside lower right", ncols=columns, frameon=False, fontsize="small")


def _broken(values: Sequence[float]) -> list[int]:
    """Return the steps without a finite value."""
    return [step for step, value in enumerate(values, 1) if not math.isfinite(value)]


def draw_throughput(verdict: Verdict) -> Any:
    cells = [cell for cell in verdict.cells.values() if cell.tokens_per_second][:_MAX_BARS]
    if not cells:
        return None
    speeds = [list(cell.speeds.values()) for cell in cells]
    axes = _rows(cells, [cell.tokens_per_second or 0 for cell in cells], speeds)
    for row, values in enumerate(speeds):
        if len(values) > 1:
            axes.plot([min(values), max(values)], [row, row], color=_DARK, linewidth=1.4, zorder=3)
    axes.set(xlabel="tokens per second", xlim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return axes.figure


def draw_efficiency(verdict: Verdict) -> Any:
    cells = verdict.cells.values()
    found = [(cell, cell.speed_up, cell.efficiency) for cell in cells if cell.speed_up and cell.efficiency][:_MAX_BARS]
    if len(found) < 2:
        return None
    efficiencies = [efficiency for *_, efficiency in found]
    axes = _rows([cell for cell, *_ in found], efficiencies)
    for row, (_, speed_up, efficiency) in enumerate(found):
        ranks = speed_up / efficiency
        more = f", {ranks:g} times the ranks" if ranks != 1 else ""
        axes.annotate(
            f"{speed_up:.2f} times as fast{more}", (efficiency if efficiency < 0.5 else max(1, efficiency), row),
            xytext=(4, 0), textcoords="offset points", va="center", fontsize="x-small",
        )  # fmt: skip
    axes.axvline(1, color=_RED, linestyle="--", linewidth=1.2, label="ideal")
    axes.set(xlabel="efficiency: speed-up by ratio of ranks", xlim=(0, 1.45 * max(1, *efficiencies)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    _legend(axes)
    return axes.figure


def draw_memory(verdict: Verdict) -> Any:
    cells = [cell for cell in verdict.cells.values() if any(cell.peak_memory)][:_MAX_BARS]
    if not cells:
        return None
    peaks = [max(cell.peak_memory) for cell in cells]
    unit, name = unit_of_bytes(max(peaks))
    marks = [[value / unit for value in cell.peak_memory] for cell in cells]
    axes = _rows(cells, [peak / unit for peak in peaks], marks)
    rows = {cell.id: row for row, cell in enumerate(cells)}
    planned, counted = defaultdict[int, float](float), defaultdict[int, float](float)  # by row
    for check in verdict.memory:
        if check["kind"] != "resident" and check["cell"] in rows:
            planned[rows[check["cell"]]] += check["predicted"] / unit
            counted[rows[check["cell"]]] += check["measured"] / unit if check["kind"] != "peak" else 0
    if any(counted.values()):
        label = "tensors of the fullest rank"
        axes.barh(list(counted), list(counted.values()), height=0.3, color=_DARK, label=label)
    if planned:
        axes.plot(
            list(planned.values()), list(planned), "D", color=_RED, markersize=5, zorder=4,
            clip_on=False, label="planned",
        )  # fmt: skip
        _legend(axes, 2)
    source = next((cell.first.peak_memory_source for cell in cells if cell.first), "")
    label = f"peak memory of a rank ({name}{', ' + source if source else ''})"
    axes.set(xlabel=label.encode("ascii", "replace").decode(), xlim=(0, None))
    return axes.figure


def draw_split(verdict: Verdict) -> Any:
    cells = [cell for cell in verdict.cells.values() if any(cell.split.values())][:_MAX_BARS]
    parts = parts_of(cells)
    if len(parts) < 2:
        return None
    axes = _rows(cells)
    unit, name = (1, "s") if max(sum(cell.split.values()) for cell in cells) >= 1 else (1e-3, "ms")
    starts = [0.0] * len(cells)
    for number, part in enumerate(parts):
        widths = [cell.split.get(part, 0.0) / unit for cell in cells]
        axes.barh(
            range(len(cells)), widths, left=starts, height=0.62, color=f"C{number}", alpha=0.8,
            label=PARTS.get(part, part),
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set(xlabel=f"{name} a step", xlim=(0, None))
    _legend(axes, min(4, len(parts)))
    return axes.figure


def draw_loss(verdict: Verdict) -> Any:
    """Draw the losses of each cell over steps, earlier ones wider, so that equal ones all show."""
    different = verdict.different
    rows = [(cell.id, cell.first.loss) for cell in verdict.cells.values() if cell.first and cell.first.loss]
    rows.sort(key=lambda row: row[0] in different)  # on top of the others
    rows = rows[:_MAX_CURVES]
    if not rows:
        return None
    pyplot = open_pyplot()
    figure, axes = pyplot.subplots(figsize=(9.0, max(4.0, 0.6 + 0.19 * len(rows))), layout="constrained")
    colors = pyplot.get_cmap("turbo" if len(rows) > 10 else "tab10")
    for number, (name, values) in enumerate(rows):
        color = colors(number / (len(rows) - 1) if len(rows) > 10 else number)
        back = len(rows) - 1 - number
        axes.plot(
            range(1, len(values) + 1), values, color=color, solid_capstyle="butt",
            linewidth=1.3 + (min(7.0, 1.6 * back) if len(rows) < 6 else 7.0 * back / len(rows)),
            marker="o" if len(values) == 1 else None, label=_label(name),
        )  # fmt: skip
        broken = _broken(values)
        axes.plot(
            broken, [0.97] * len(broken), "x", color=color, markersize=8, clip_on=False,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def draw_difference(verdict: Verdict) -> Any:
    rows: list[tuple[Summary, list[float]]] = []
    tolerances = set()
    for group in verdict.groups:
        reference = verdict.cells[group["reference"]].first
        assert reference is not None
        others = {*group["same"], *group["different"]} - {group["reference"]}
        for name, cell in verdict.cells.items():
            if name in others and cell.first:
                tolerances.add(group["tolerance"])
                rows.append((cell, [*map(relative_difference, cell.first.loss, reference.loss)]))
    if not rows:
        return None
    from matplotlib.colors import LogNorm

    rows = rows[:_MAX_CURVES]
    axes = _rows([cell for cell, _ in rows])
    steps = max(len(values) for _, values in rows)
    grid = [[*values, *[math.nan] * (steps - len(values))] for _, values in rows]
    top = max([value for row in grid for value in row if math.isfinite(value)] + [*tolerances])
    colors = open_pyplot().get_cmap("viridis_r").with_extremes(under="white", bad="white")
    image = axes.imshow(
        grid, aspect="auto", cmap=colors, norm=LogNorm(_FLOOR, max(top, 10 * _FLOOR)),
        interpolation="nearest", extent=(0.5, steps + 0.5, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    for row, (_, values) in enumerate(rows):
        broken = _broken(values)
        axes.plot(broken, [row] * len(broken), "x", color=_RED, markersize=6)
    axes.set(xlabel="step (colour: relative to the reference; white: equal; red: the tolerance)")
    axes.grid(visible=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    bar = axes.figure.colorbar(image)
    for tolerance in tolerances:
        bar.ax.axhline(tolerance, color=_RED, linestyle="--", linewidth=1.2)
        bar.ax.annotate(
            f"{tolerance:g}", (0.5, tolerance), xycoords=("axes fraction", "data"),
            ha="center", va="bottom", fontsize="x-small", color=_RED,
        )  # fmt: skip
    return axes.figure


PICTURES = {
    "throughput": ("Speed of each cell", draw_throughput),
    "efficiency": ("Speed-up and efficiency beside the baseline", draw_efficiency),
    "split": ("Where the time of a step goes", draw_split),
    "memory": ("Peak memory of a rank", draw_memory),
    "loss": ("Loss of the first repeat", draw_loss),
    "loss_difference": ("Loss beside the reference of its group", draw_difference),
}
"""A file's name -> the title in the picture and what draws it, in the order of a report."""


def draw(study: Study, verdict: Verdict, folder: Path) -> dict[str, bytes]:
    """Draw all pictures that the study has figures for into ``folder/plots``; older ones go.

    Return them by name, as PNG files of few colours: a third of matplotlib's bytes. Raises StorageError.
    """
    from PIL import Image  # comes with matplotlib

    drawn = {}
    for name, (title, plot) in PICTURES.items():
        path = folder / FOLDER / f"{name}.png"
        figure = plot(verdict)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        words = f"{title}: {study.title}" if study.title.isascii() else title
        figure.suptitle(words, fontsize="medium", wrap=True)
        whole, reduced = io.BytesIO(), io.BytesIO()
        figure.savefig(whole, dpi=_DPI, format="png")
        open_pyplot().close(figure)
        Image.open(whole).convert("RGB").quantize(_COLORS).save(reduced, "PNG", optimize=True)
        drawn[name] = reduced.getvalue()
        with atomic_write(path) as file:
            file.write(drawn[name])
    return drawn

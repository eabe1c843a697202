"""Curves of one or more runs as a PNG, from their ``metrics.jsonl``."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError
from common.files import atomic_write, refuse_to_overwrite
from common.training.metrics import METRICS_FILE, read_metrics

_NUMBER = (int, float)  # not bool
_UNITS = {
    "loss": "loss (nats per token)",
    "step_time": "step time (s)",
    "data_wait": "data wait (s)",
    "validation_time": "validation time (s)",
    "peak_memory": "peak memory (bytes)",
}


def plot_loss(folder: Path) -> Path:
    """Draw ``folder/loss.png`` from the run's metrics: training loss, its moving average and validation loss."""
    pyplot = open_pyplot()
    rows = read_metrics(folder / METRICS_FILE)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    _draw(axes, "training loss", rows, "loss", "#1f5a94", 0, "validation loss", "#c4501b")
    axes.set(xlabel="step", ylabel=_UNITS["loss"], title=folder.name)
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False)
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def plot_runs(
    folders: Sequence[Path], output: Path, metrics: Sequence[str] = ("loss", "tokens_per_second"), smoothing: int = 0
) -> None:
    """Draw the runs into ``output``, with one panel a metric and one colour a run.

    Each curve is the moving average, over faint single values, with dots for validations. smoothing: rows that are
    averaged; 0 stands for a fiftieth of a run. Raises DataError (no metrics), ConfigError and StorageError (output).
    """
    if output.suffix != ".png":
        raise ConfigError(f"--output {output}: expected a name that ends with .png")
    refuse_to_overwrite((_metrics_of(folder) for folder in folders), [output], "choose another --output")
    runs = {name: _read(folder) for name, folder in zip(_names(folders), folders, strict=True)}
    numbers = {key for rows in runs.values() for row in rows for key, value in row.items() if type(value) in _NUMBER}
    known = sorted(numbers - {"step"})
    for metric in metrics:
        if metric not in known:
            raise DataError(
                f"no run has numbers called {metric}; --metric may name"
                f" {', '.join(known) or 'nothing: the files are empty'}"
            )
    pyplot = open_pyplot()
    figure, panels = pyplot.subplots(
        len(metrics), figsize=(9, 1 + 3.2 * len(metrics)), sharex=True, squeeze=False, layout="constrained"
    )
    for (axes,), metric in zip(panels, metrics, strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            color, validation = f"C{number % 10}", f"{name}, validation"
            _draw(axes, name, rows, metric, color, smoothing, validation, color)
        axes.set(ylabel=_UNITS.get(metric, metric.replace("_", " ")))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize="small")
    panels[-1][0].set(xlabel="step")
    with atomic_write(output) as file:
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)


def _draw(
    axes: Any,
    name: str,
    rows: list[dict[str, Any]],
    metric: str,
    color: str,
    smoothing: int,
    validation: str,
    validation_color: str,
) -> None:
    """Draw a moving average over faint values, and validations as dots."""
    points = _series(rows, metric)
    validations = _series(rows, "validation_loss") if metric == "loss" else []
    if points:
        steps, values = zip(*points, strict=True)
        width = smoothing or max(1, len(values) // 50)
        if width > 1:
            axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        # the mean of up to ``width`` values around each, so that it follows a steep curve
        sums = [0.0, *itertools.accumulate(values)]
        ends = [(max(0, at - (width - 1) // 2), min(len(values), at + width // 2 + 1)) for at in range(len(values))]
        means = [(sums[end] - sums[start]) / (end - start) for start, end in ends]
        axes.plot(steps, means, color=color, linewidth=1.4, label=name)
    if validations:
        axes.plot(
            *zip(*validations, strict=True),
            color=validation_color,
            marker="o",
            markersize=4,
            linewidth=0.8,
            linestyle="--",
            label=validation,
        )


def _metrics_of(folder: Path) -> Path:
    return folder if folder.is_file() else folder / METRICS_FILE


def _read(folder: Path) -> list[dict[str, Any]]:
    path = _metrics_of(folder)
    try:
        return read_metrics(path)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; expected the folder of a run, which holds {METRICS_FILE}"
        ) from None


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path if these differ, else the whole paths."""
    last = [folder.resolve().name for folder in folders]
    names = last if len(set(last)) == len(last) else [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(f"a run is given twice: {', '.join(names)}; give each once")
    return names


def _series(rows: list[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    return [(row["step"], row[metric]) for row in rows if type(row.get(metric)) in _NUMBER]


def open_pyplot() -> Any:
    """Return matplotlib's pyplot, set up to draw files without a screen, and names of runs in Chinese too."""
    from matplotlib import font_manager, pyplot, use

    use("Agg")
    names = filter(re.compile("CJK|Han Sans|WenQuanYi|SimHei|YaHei|PingFang").search, font_manager.get_font_names())
    pyplot.rcParams["font.family"] = ["sans-serif", *sorted(names)]
    warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # a box stands for it
    return pyplot

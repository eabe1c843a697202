"""The PNG files of a study."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import atomic_write
from common.study import drawing
from common.study.drawing import Sheet
from common.study.results import Study
from common.study.statistics import Summary
from common.study.verdict import Verdict
from common.training.plot import open_pyplot

FOLDER = "plots"
PICTURES = {
    "throughput": drawing.draw_throughput,
    "efficiency": drawing.draw_efficiency,
    "split": drawing.draw_split,
    "memory": drawing.draw_memory,
    "loss": drawing.draw_loss,
    "loss_difference": drawing.draw_difference,
    "prediction": drawing.draw_prediction,
}
"""Names of the files, in the order of a report. Their titles are in the templates."""
_DPI = 110
_COLORS = 200


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

"""The pictures of a study: which there are, what they show, and their PNG files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.files import atomic_write
from common.study import drawing
from common.study.drawing import Sheet
from common.study.results import Study
from common.study.statistics import Summary
from common.study.verdict import Verdict
from common.study.words import Text
from common.training.plot import open_pyplot

FOLDER = "plots"
_DPI = 110
_COLORS = 200


class Picture(NamedTuple):
    """One PNG and what it shows. name: of the file in FOLDER, without .png."""

    name: str
    title: Text
    caption: Text


def draw(
    study: Study, cells: Mapping[str, Summary], verdict: Verdict, folder: Path
) -> list[Picture]:
    """Draw all pictures that the study has figures for into ``folder/plots``; older ones go.

    Raises StorageError.
    """
    target = folder / FOLDER
    sheet = Sheet(study, list(cells.values()), verdict, open_pyplot())
    drawn = []
    for picture, plot in _PICTURES:
        path = target / f"{picture.name}.png"
        figure = plot(sheet)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        with atomic_write(path) as file:
            file.write(_png(figure))
        sheet.pyplot.close(figure)
        drawn.append(picture)
    return drawn


def _png(figure: Any) -> bytes:
    """Return the figure as a PNG of few colours, a third of matplotlib's bytes."""
    from PIL import Image  # comes with matplotlib

    whole, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(whole, dpi=_DPI, format="png")
    Image.open(whole).convert("RGB").quantize(_COLORS).save(reduced, "PNG", optimize=True)
    return reduced.getvalue()


def known_pictures(files: Sequence[Path]) -> list[Picture]:
    """Return what these files show, in the order of a report."""
    found = {file.stem for file in files}
    return [picture for picture, _ in _PICTURES if picture.name in found]


_PICTURES: tuple[tuple[Picture, Callable[[Sheet], Any]], ...] = (
    (
        Picture(
            "throughput",
            Text("Throughput", "吞吐量"),
            Text(
                "Bars: median over repeats. Ticks: each repeat; the line joins the lowest and the"
                " highest.",
                "条形为各次重复的中位数；短竖线为每次重复，横线连接最低与最高值。",
            ),
        ),
        drawing.draw_throughput,
    ),
    (
        Picture(
            "efficiency",
            Text("Speed-up and efficiency", "加速比与效率"),
            Text(
                "Against each cell's baseline; the dashed line is ideal, as many times faster as"
                " there are more ranks.",
                "相对各配置的基准；虚线为理想情况，即速度与进程数同比增长。",
            ),
        ),
        drawing.draw_efficiency,
    ),
    (
        Picture(
            "split",
            Text("Where the time of a step goes", "单步时间构成"),
            Text(
                "Seconds a step by part; what the backend's profiler does not tell is left out.",
                "单步时间按部分划分；后端的性能分析器未给出的部分不计入。",
            ),
        ),
        drawing.draw_split,
    ),
    (
        Picture(
            "memory",
            Text("Peak memory of a rank", "单进程峰值内存"),
            Text(
                "Bars: the fullest rank. Ticks: every rank. Diamonds: the plan.",
                "条形为占用最多的进程；短竖线为每个进程；菱形为规划值。",
            ),
        ),
        drawing.draw_memory,
    ),
    (
        Picture(
            "loss",
            Text("Loss curves", "损失曲线"),
            Text(
                "The first repeat of each cell. Equal curves lie inside each other.",
                "每个配置的第一次重复；相同的曲线由粗到细叠在一起。",
            ),
        ),
        drawing.draw_loss,
    ),
    (
        Picture(
            "loss_difference",
            Text("Difference of losses", "损失差异"),
            Text(
                "Relative to the reference cell of each group. A cross marks a step without a"
                " finite loss.",
                "相对各组参照配置的差异；叉号表示该步损失不是有限值。",
            ),
        ),
        drawing.draw_difference,
    ),
    (
        Picture(
            "prediction",
            Text("Plan against measurement", "规划与实测"),
            Text(
                "One dot a cell; on the dashed line the plan is exact.",
                "每点为一个配置；落在虚线上表示规划与实测一致。",
            ),
        ),
        drawing.draw_prediction,
    ),
)

#!/usr/bin/env python
"""Draw the figures of README and docs beside this script.

    python docs/figures/make_figures.py [--run output/quickstart]

Each SVG is a list of boxes and arrows; one with Chinese labels ends in _zh. With --run the loss of
the quick start is drawn too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.parallel.topology import Coordinates, Topology
from common.training.plot import plot_loss
from common.yaml_files import read_yaml_mapping

FOLDER = Path(__file__).parent
LABELS = read_yaml_mapping(FOLDER / "labels.yaml")
FONT = "font-family='Helvetica, Arial, Noto Sans CJK SC, PingFang SC, Microsoft YaHei, sans-serif'"
COLOURS = {
    "input": ("#fff7e6", "#c98a1b"),
    "shared": ("#eaf2fb", "#2f6db3"),
    "torch": ("#fdecea", "#c8452f"),
    "mindspore": ("#eaf6ec", "#2f8f4e"),
    "output": ("#f3f0fa", "#6b4fa8"),
}
"""Fill and line of each kind of box."""


class Figure:
    """An SVG picture of boxes and arrows; coordinates are pixels from the upper left."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, kind: str, *lines: str) -> None:
        """Draw a box with its first line in bold and the others below it."""
        fill, line = COLOURS[kind]
        self._parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='7' fill='{fill}'"
            f" stroke='{line}' stroke-width='1.4'/>"
        )
        first = y + height // 2 - 9 * (len(lines) - 1) + 5
        for number, text in enumerate(lines):
            size, weight = (13, 400) if number else (15, 600)
            self.text(x + width // 2, first + 18 * number, text, size, weight)

    def text(self, x: int, y: int, text: str, size: int = 12, weight: int = 400) -> None:
        """Write a line centred at a point."""
        self._parts.append(
            f"<text x='{x}' y='{y}' text-anchor='middle' {FONT} font-size='{size}'"
            f" font-weight='{weight}' fill='#222'>{escape(text)}</text>"
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int) -> None:
        """Draw an arrow from one point to another."""
        self._parts.append(
            f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='#666' stroke-width='1.6' marker-end='url(#head)'/>"
        )

    def svg(self) -> str:
        """Return the picture as a text."""
        head = (
            "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7'"
            " orient='auto'><path d='M0 0 L10 5 L0 10 z' fill='#666'/></marker></defs>"
        )
        body = "\n".join([head, *self._parts])
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}'"
            f" width='{self.width}' height='{self.height}'>\n"
            f"<rect width='{self.width}' height='{self.height}' fill='white'/>\n{body}\n</svg>\n"
        )


def parts(language: str) -> Figure:
    """Draw what goes into a run, what computes it and what comes out."""
    say = LABELS["parts"][language]
    figure = Figure(880, 454)
    for x, name in ((20, "yaml"), (305, "data"), (590, "weights")):
        figure.box(x, 16, 270, 78, "input", *say[name])
        figure.arrow(x + 135, 94, x + 135, 124)
    figure.box(20, 124, 840, 62, "shared", *say["common"])
    for x, name in ((20, "torch"), (500, "mindspore")):
        figure.arrow(x + 180, 186, x + 180, 214)
        figure.box(x, 214, 360, 76, name, *say[name])
        figure.arrow(x + 180, 290, x + 180, 324)
    for x in (380, 500):
        figure.arrow(440, 256, x, 256)
    figure.text(440, 246, *say["shared"])
    figure.box(20, 324, 840, 30, "shared", *say["either"])
    for number, name in enumerate(("checkpoint", "results", "exports", "serve")):
        figure.arrow(119 + 214 * number, 354, 119 + 214 * number, 378)
        figure.box(20 + 214 * number, 378, 198, 60, "output", *say[name])
    return figure


def layout(language: str) -> Figure:
    """Draw the ranks of configs/gpt2/run_gpt2_13b.yaml: a column a stage, a row a replica."""
    say = LABELS["layout"][language]
    ranks = Topology(data=4, tensor=2, pipeline=4)
    figure = Figure(880, 476)
    figure.text(440, 28, say["title"], 15, 600)
    for stage, kind in enumerate(("shared", "torch", "mindspore", "output")):
        x = 170 + 180 * stage
        figure.text(x + 70, 60, say["stage"].format(stage, 10 * stage, 10 * stage + 9), 13)
        for data in range(4):
            y = 74 + 80 * data
            for tensor in range(2):
                at = Coordinates(data=data, tensor=tensor, pipeline=stage)
                figure.box(x + 72 * tensor, y, 68, 46, kind, str(ranks.rank(at)))
            if stage:
                figure.arrow(x - 20, y + 23, x - 38, y + 23)
                figure.arrow(x - 20, y + 23, x - 2, y + 23)
            if data:
                figure.arrow(x + 70, y - 17, x + 70, y - 32)
                figure.arrow(x + 70, y - 17, x + 70, y - 2)
    for data in range(4):
        figure.text(84, 94 + 80 * data, say["replica"].format(data), 15, 600)
        figure.text(84, 112 + 80 * data, say["windows"], 13)
    for number, name in enumerate(("across", "pair", "down")):
        figure.text(440, 406 + 24 * number, say[name], 13)
    return figure


WIDE, HIGH, GAP, EDGE = 232, 64, 30, 16
"""Width and height of a box, space between boxes and around them, in pixels."""


def flow(name: str, language: str) -> Figure:
    """Draw boxes on a grid, with arrows along its rows and columns."""
    boxes, arrows = LABELS["flows"][name].values()
    rows = 1 + max(box["at"][2] for box in boxes)
    across, down = WIDE + GAP, HIGH + GAP
    figure = Figure(2 * EDGE + 4 * across - GAP, 2 * EDGE + rows * down - GAP)
    for box in boxes:
        kind, column, row, span = box["at"]
        place = EDGE + column * across, EDGE + row * down
        figure.box(*place, span * across - GAP, HIGH, kind, *box[language])
    for start, top, bottom in arrows:
        x, y = EDGE + round(start * across) - GAP // 2, EDGE + top * down
        if top < bottom:
            figure.arrow(x, y + HIGH, x, y + down)
        elif top > bottom:
            figure.arrow(x, y, x, y - GAP)
        elif top % 2:  # the second row of a path is read from right to left
            figure.arrow(x + GAP // 2, y + HIGH // 2, x - GAP // 2, y + HIGH // 2)
        else:
            figure.arrow(x - GAP // 2, y + HIGH // 2, x + GAP // 2, y + HIGH // 2)
    return figure


DRAWN: dict[str, Callable[[str], Figure]] = {
    "parts": parts,
    "layout": layout,
    **{name: partial(flow, name) for name in LABELS["flows"]},
}
FIGURES = {
    f"{name}{ending}.svg": partial(draw, language)
    for name, draw in DRAWN.items()
    for ending, language in (("", "en"), ("_zh", "zh"))
}
"""File name -> the function that draws it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run folder of a finished quick start")
    arguments = parser.parse_args()
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")
    if arguments.run:
        shutil.copyfile(plot_loss(arguments.run), FOLDER / "quickstart_loss.png")


if __name__ == "__main__":
    main()

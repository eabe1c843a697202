"""The figures of README and docs are those that their script draws, and pages show them."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.figures.make_figures import FIGURES, FOLDER

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_the_script_draws(name: str) -> None:
    drawn = FIGURES[name]().svg()
    assert (FOLDER / name).read_text(encoding="utf-8") == drawn, (
        "run python docs/figures/make_figures.py"
    )
    width, height = (int(ElementTree.fromstring(drawn).attrib[key]) for key in ("width", "height"))
    boxes = list(ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) > 5
    for box in boxes[1:]:
        x, y, wide, high = (int(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0 and x + wide <= width and y >= 0 and y + high <= height


def test_every_figure_is_on_a_page() -> None:
    pages = [*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")]
    shown = {
        Path(target).name
        for page in pages
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert shown == set(FIGURES) | {"quickstart_loss.png", "plan_accuracy.png"}

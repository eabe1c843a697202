"""Tables of the pages: what users of other systems find, and the keys of generation."""

from __future__ import annotations

import re
from pathlib import Path

from common.config.schema import PredictConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("coming_from.md", "coming_from_zh.md")
STATES = {
    "coming_from.md": ("same", "here as", "planned", "needs devices", "not here"),
    "coming_from_zh.md": ("相同", "换一种写法", "已规划", "需要设备", "没有"),
}
"""First words of a page's last column, in order."""


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def rows(page: str) -> list[tuple[str, str, str]]:
    """The three cells of each row of the tables of systems, titles of groups left out."""
    found = []
    for line in text_of(page).partition("\n## ")[2].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and any(cells[1:]) and not set(cells[0]) <= {"-"}:
            found.append((cells[0], cells[1], cells[2]))
    return found


def test_both_languages_have_the_same_rows() -> None:
    english, chinese = (rows(page) for page in PAGES)
    assert len(english) == len(chinese) > 80
    for ours, theirs in zip(english, chinese, strict=True):
        spans = [sorted(re.findall(r"`([^`]+)`", cells[1])) for cells in (ours, theirs)]
        assert spans[0] == spans[1], f"{ours[0]} | {theirs[0]}"


def test_both_languages_say_the_same_of_each_row() -> None:
    found = []
    for page in PAGES:
        words = [re.match(r"\*\*(.+?)\*\*", state) for _, _, state in rows(page)]
        found.append([STATES[page].index(word[1]) if word else None for word in words])
    assert found[0] == found[1]


def test_the_pages_on_generation_name_what_there_is() -> None:
    """The first column of their table holds keys of predict."""
    for name in ("generation.md", "generation_zh.md"):
        column = re.findall(r"^\| (`[^|]*)", text_of(name), flags=re.M)[1:]
        keys = [key for cell in column for key in re.findall(r"`(\w+)`", cell)]
        assert len(keys) == 22 and set(keys) <= PredictConfig.model_fields.keys()

"""Tables of the pages: what users of other systems find, and the keys of generation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.config.schema import PredictConfig

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ("mindformers", "megatron", "paddlefleetx", "oneflow", "nanogpt", "transformers")
STATES = {
    "": ("same", "here as", "planned", "needs devices", "not here"),
    "_zh": ("相同", "换一种写法", "已规划", "需要设备", "没有"),
}
"""First words of a page's last column in each language, in order."""


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def rows(page: str) -> list[tuple[str, str, str]]:
    """The three cells of each row, titles of groups left out."""
    found = []
    for line in text_of(page).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and any(cells[1:]) and not set(cells[0]) <= {"-"}:
            found.append((cells[0], cells[1], cells[2]))
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_both_languages_have_the_same_rows_and_say_the_same_of_each(system: str) -> None:
    found = {end: rows(f"from_{system}{end}.md") for end in STATES}
    assert len(found[""]) == len(found["_zh"]) > 9
    for ours, theirs in zip(found[""], found["_zh"], strict=True):
        spans = [sorted(re.findall(r"`([^`]+)`", cells[1])) for cells in (ours, theirs)]
        assert spans[0] == spans[1], f"{ours[0]} | {theirs[0]}"
    states = []
    for end, known in STATES.items():
        words = [re.match(r"\*\*(.+?)\*\*", state) for _, _, state in found[end]]
        states.append([known.index(word[1]) if word else None for word in words])
    assert states[0] == states[1]


def test_the_pages_on_generation_name_what_there_is() -> None:
    """The first column of their table holds keys of predict."""
    for name in ("generation.md", "generation_zh.md"):
        column = re.findall(r"^\| (`[^|]*)", text_of(name), flags=re.M)[1:]
        keys = [key for cell in column for key in re.findall(r"`(\w+)`", cell)]
        assert len(keys) == 22 and set(keys) <= PredictConfig.model_fields.keys()

"""What pages hold beside commands: tables for users of other systems, messages, figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.figures.make_figures import FIGURES, FOLDER

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ("mindformers", "megatron", "paddlefleetx", "oneflow", "nanogpt", "transformers")
STATES = {
    "": ("same", "here as", "planned", "needs devices", "not here"),
    "_zh": ("相同", "换一种写法", "已规划", "需要设备", "没有"),
}
"""First words of a page's last column in each language, in order."""
NO_MESSAGES = {"temperature", "checkpoints/latest", "input should be"}
"""Names in the first column that are not messages, and the start of pydantic's own messages."""


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


def messages(end: str) -> list[str]:
    """Return the quoted parts of the first column of every table of messages."""
    text = text_of(f"troubleshooting{end}.md") + text_of(f"doctor{end}.md")
    text += text_of(f"clusters{end}.md").rpartition("\n## ")[2]
    cells = re.findall(r"^\| (.*?) \|", text, flags=re.M)
    return [quoted for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)]


def test_the_messages_that_pages_explain_are_in_the_program() -> None:
    folders = ("common", "torch_gpt2", "mindformers_gpt2", "tools", "scripts")
    files = [path for name in folders for path in (ROOT / name).rglob("*.[ps][yh]")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    joined = re.sub(r"\"\s*\n\s*f?\"", "", source)  # a message over several lines
    found = messages("")
    assert len(found) > 30 and messages("_zh") == found
    assert [each for each in found if each not in joined and each not in NO_MESSAGES] == []


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_the_script_draws(name: str) -> None:
    drawn = FIGURES[name]().svg()
    assert (FOLDER / name).read_text(encoding="utf-8") == drawn, "run python docs/figures/make_figures.py"


def test_every_figure_is_on_a_page() -> None:
    pages = [*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = {Path(target).name for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}
    assert shown == set(FIGURES) | {"quickstart_loss.png", "plan_accuracy.png"}

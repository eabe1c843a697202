"""The messages that pages explain exist, in both languages."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("troubleshooting", "doctor", "clusters")
WORDS = {"temperature", "checkpoints/latest", "input should be"}
"""Names in the first column that are not messages, and the start of pydantic's own messages."""


def messages(ending: str) -> list[str]:
    """Return the quoted parts of the first column of every table of messages."""
    *texts, clusters = [(ROOT / "docs" / f"{name}{ending}.md").read_text("utf-8") for name in PAGES]
    text = "".join(texts) + clusters.rpartition("\n## ")[2]
    cells = re.findall(r"^\| (.*?) \|", text, flags=re.M)
    return [quoted for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)]


def test_every_message_of_the_page_is_in_the_program() -> None:
    folders = ("common", "torch_gpt2", "mindformers_gpt2", "tools", "scripts")
    files = [path for name in folders for path in (ROOT / name).rglob("*.[ps][yh]")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    joined = re.sub(r"\"\s*\n\s*f?\"", "", source)  # a message over several lines
    found = messages("")
    assert len(found) > 30
    assert [message for message in found if message not in joined and message not in WORDS] == []


def test_both_languages_explain_the_same_messages() -> None:
    assert messages("") == messages("_zh")

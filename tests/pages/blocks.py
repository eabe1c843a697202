"""The code blocks of a Markdown page, what each prints, and the commands of a shell block."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ("bash", "shell", "python")
SHOWN = "sh"
OUTPUT = "text"
_FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", flags=re.M | re.S)
_OPENS, _CLOSES = ("for", "while", "if"), ("done", "fi")


@dataclass(frozen=True)
class Block:
    kind: str
    """The word behind the fence, "" where there is none."""
    text: str
    line: int
    """Line of the opening fence, from 1."""
    heading: str
    prints: str | None = None
    """The ``text`` block that follows a block of commands under the same heading."""

    @property
    def path(self) -> str | None:
        """The file that a YAML block becomes: its first line is ``# some/path.yaml``."""
        found = re.match(r"# (\S+\.ya?ml)\n", self.text) if self.kind == "yaml" else None
        return found[1] if found else None


def pages() -> list[str]:
    """All pages in English, relative to the root."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in found if not page.stem.endswith("_zh")]


def twin(page: str) -> str:
    """Name of the page in Chinese."""
    return page.replace(".md", "_zh.md")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """The blocks of a page in order; an output belongs to the block of commands before it."""
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", before), flags=re.M)
        cut = len(match["indent"])
        lines = [line[cut:] for line in match["text"].splitlines(keepends=True)]
        block = Block(
            kind=match["kind"],
            text="".join(lines),
            line=before.count("\n") + 1,
            heading=headings[-1] if headings else "",
        )
        last = found[-1] if found else None
        if (
            block.kind == OUTPUT
            and last is not None
            and last.kind in (*RUN, SHOWN)
            and last.heading == block.heading
            and last.prints is None
        ):
            found[-1] = Block(last.kind, last.text, last.line, last.heading, block.text)
        else:
            found.append(block)
    return found


def without_comment(line: str) -> str:
    """A line of a shell up to its ``#``, which begins a comment outside of quotes only."""
    for place in re.finditer(r"(?:^|\s)#", line):
        try:
            shlex.split(line[: place.start()])
        except ValueError:  # within quotes
            continue
        return line[: place.start()].rstrip()
    return line.rstrip()


def commands(block: Block) -> list[str]:
    """The commands of a block of a shell: continuation lines, quotes and loops joined, comments
    cut. Activating an environment is left out, as no command hands its variables to the next.
    """
    found, open_lines, depth = [], "", 0
    for line in re.sub(r"[ \t]*\\\n[ \t]*", " ", block.text).splitlines():
        open_lines = f"{open_lines}\n{line}" if open_lines else without_comment(line)
        try:
            words = shlex.split(open_lines.splitlines()[-1] if depth else open_lines)
        except ValueError:  # a quote ends in a later line
            continue
        if not words:
            open_lines = open_lines if depth else ""
            continue
        depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
        if depth == 0:
            found.append(open_lines.strip())
            open_lines = ""
    if open_lines:
        raise ValueError(f"line {block.line}: a quote or loop of this block does not end")
    return [
        command for command in found if not re.fullmatch(r"(source|\.) \S*/bin/activate|conda activate \S+", command)
    ]


def comparable(block: Block) -> tuple[str, ...]:
    """A block without its comments, for the comparison of two languages."""
    if block.kind in ("bash", "shell", SHOWN):
        return (block.kind, *commands(block), block.prints or "")
    lines = [re.sub(r"(^|\s+)#(?! \S+\.ya?ml$).*", "", line) for line in block.text.splitlines()]
    return (block.kind, *[line for line in lines if line.strip()], block.prints or "")

#!/usr/bin/env python
"""Check the English of docstrings, comments, messages, test names and pages.

CONTRIBUTING.md has the house rule. Each offence is a line of output. Exit code: 0 without offences,
1 with some, 2 for an argument.

    python tools/check_words.py common/launcher README.md
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from common.program import start

    start(__file__)

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from typing import NamedTuple

from common.errors import ConfigError
from common.flags import flag
from common.program import command
from common.structured_files import read_text

LARGEST = 2**20
"""Bytes of a file, at most."""
GENERATED = "docs/study_example/"
"""Reports, whose lists of cells are long sentences."""
LONGEST = 25
"""Words a sentence may have."""

OPENERS = re.compile(
    r"(?:Of|What|Those|Which|Who|Whose|Where|When|As|How|Likewise|Thus|The same)\b(?! many\b)"
)
"""First words of a docstring that make sense only beside its signature."""

CLAUSES = ("When", "Where", "As", "How", "The same")
"""Openers that a comment or the name of a test may have."""

PHRASES = {
    r"(?<![Tt]here )\b(?:is|are|was|were|be) no\b(?! (?:longer|more|less|later)\b)": '"is not a"',
    r"\bmend(?:s|ed|ing)?\b": '"fix"',
    r"(?<!let )(?<!leave )(?<!leaves )(?<!left )(?<!-)\balone\b": '"only"',
    r"\b(?:go|goes|going|went|gone) on\b(?! to\b)": '"resume" or "continue"',
    r"\b(?:take|takes|took|taken|taking) up\b": '"resume"',
    r"\banew\b": '"again" or "start over"',
    r"\bas ever\b": '"as usual"',
    r"\b(?:whither|whence|thence|hither|thereof|thereby|therein|wherein|whereby)\b": "a plain word",
    r"\bon with\b(?= (?:one|two|three|four)\b)": '"continue with"',
}
"""Phrases of a dialect, each with the plain words for it."""


class Passage(NamedTuple):
    """A text that a person reads, and the line at which it begins."""

    line: int
    text: str
    kind: str


def _messages(tree: ast.AST, docstrings: set[int]) -> Iterator[Passage]:
    """Yield string constants of several words, f-strings as one text."""
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in parts or id(node) in docstrings:
                continue
            text = node.value
        else:
            continue
        if len(text.split()) > 2:
            yield Passage(node.lineno, text, "message")


def _comments(text: str) -> Iterator[Passage]:
    """Yield comments of Python, lines below one another as one text."""
    last, column, block = -1, -1, Passage(0, "", "comment")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#!: ").strip()
        if re.match(r"noqa|type:|pragma|ruff:|codespell|mypy:|fmt:|usr/bin", words):
            continue
        row, indent = token.start
        own = not token.line[:indent].strip()
        if own and row == last + 1 and indent == column:
            block = block._replace(text=f"{block.text}\n{words}")
        else:
            if block.text:
                yield block
            block = Passage(row, words, "comment")
        last, column = (row, indent) if own else (-1, -1)
    if block.text:
        yield block


def python_passages(text: str, *, messages: bool) -> Iterator[Passage]:
    """Yield docstrings, comments, names of tests and, if asked, messages of a Python file."""
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Passage(node.lineno, node.name[5:].replace("_", " ").capitalize(), "name")
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.add(id(node.value))
            yield Passage(node.lineno, node.value.value, "docstring")
    yield from _comments(text)
    if messages:
        yield from _messages(tree, docstrings)


def hash_passages(text: str) -> Iterator[Passage]:
    """Yield comments of a shell script or a YAML file, lines below one another as one text.

    Indented lines are commands and tables; they end a text and are not part of it.
    """
    block = Passage(0, "", "comment")
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*#(?!!)\s?(.*)", line)
        if found and not re.match(r"shellcheck|yaml-language-server|SBATCH|\s{2}", found[1]):
            block = (
                block._replace(text=f"{block.text}\n{found[1]}")
                if block.text
                else Passage(number, found[1], "comment")
            )
        elif block.text:
            yield block
            block = Passage(0, "", "comment")
    if block.text:
        yield block


def markdown_passages(text: str) -> Iterator[Passage]:
    """Yield paragraphs, list items, headings and cells of tables, without blocks of code."""
    fenced, start, lines = False, 0, list[str]()

    def paragraph() -> Iterator[Passage]:
        if lines:
            yield Passage(start, "\n".join(lines), "page")
            lines.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
            yield from paragraph()
        elif fenced:
            continue
        elif line.lstrip().startswith("|"):
            yield from paragraph()
            for cell in re.split(r"(?<!\\)\|", unescape(line.strip().strip("|"))):
                yield Passage(number, cell.strip(), "page")
        elif not line.strip() or line.startswith("#"):
            yield from paragraph()
        else:
            if re.match(r"\s*(?:[-*]|\d+\.)\s", line):
                yield from paragraph()
            if not lines:
                start = number
            lines.append(line)
    yield from paragraph()


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; a colon and an empty line end one, as a list item does."""
    plain = re.sub(r"``?[^`]*``?", "CODE", text)
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", plain)
    plain = re.sub(r"\n\s*(?:[-*]|\d+\.)\s", "\n\n", plain)
    yield from re.split(r"\n(?=[├└│])|(?<=[.?!:])[)\"'*]*\s+|\n\s*\n|\n\s{4,}", plain)


def offences(passage: Passage) -> Iterator[tuple[str, str]]:
    """Yield the rule that a passage breaks, and the words that break it."""
    text = passage.text
    if passage.kind in ("docstring", "comment", "name"):
        found = OPENERS.match(text.lstrip())
        if found and (passage.kind == "docstring" or found[0] not in CLAUSES):
            yield "opening", text.strip().split("\n")[0][:70]
    plain = re.sub(r"`[^`]*`", "CODE", " ".join(text.split()))
    for pattern, better in PHRASES.items():
        for found in re.finditer(pattern, plain):
            yield (
                f"{found[0]!r}: write {better}",
                plain[max(0, found.start() - 30) : found.end() + 30],
            )
    if passage.kind == "message":
        return
    for sentence in sentences(text):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > LONGEST:
            yield f"sentence of more than {LONGEST} words", " ".join(words)[:70]
        if sentence.count(";") > 1:
            yield "more than one semicolon in a sentence", " ".join(words)[:70]


def passages(path: Path) -> Iterator[Passage]:
    """Yield what a person reads of a file; nothing of a kind that is not checked."""
    if GENERATED in path.as_posix():
        return
    if path.suffix == ".py":
        text = read_text(path, limit=LARGEST)
        yield from python_passages(text, messages="tests" not in path.parts)
    elif path.suffix == ".md" and not path.stem.endswith("_zh"):
        yield from markdown_passages(read_text(path, limit=LARGEST))
    elif path.suffix in (".sh", ".yaml", ".swb"):
        yield from hash_passages(read_text(path, limit=LARGEST))


@dataclass(kw_only=True)
class Request:
    paths: tuple[str, ...] = flag(
        "files or folders; all files of the project if none", positional=True, nargs="*"
    )
    count: bool = flag("print the number of offences of each rule")


@command(Request)
def main(request: Request) -> int:
    command = ["git", "ls-files", "-z", "--", *request.paths]
    try:
        listed = subprocess.check_output(command, text=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"{error}; run it in a clone of the repository") from None
    return report(listed.rstrip("\0").split("\0"), count=request.count)


def report(names: list[str], *, count: bool) -> int:
    """Print the offences in files, or the number of each. Return 1 if there are some."""
    counts: Counter[str] = Counter()
    for name in filter(None, names):
        for passage in passages(Path(name)):
            for rule, words in offences(passage):
                counts[rule.split(":")[0]] += 1
                if not count:
                    print(f"{name}:{passage.line}: {rule}: {' '.join(words.split())}")
    if count:
        for rule, number in counts.most_common():
            print(f"{number:6} {rule}")
    return 1 if counts else 0

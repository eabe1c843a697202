"""Words of a shell script, without running anything.

Followed are assignments ``NAME=value`` and ``NAME=(values)``, ``$NAME``, ``${NAME}``,
``${NAME[@]}``, ``${NAME:-value}``, ``$((A * B))`` of integers, quotes and continued lines. A word
with anything else, such as ``$(command)``, is kept as it is written, with the reason.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


def _nested(opening: str, closing: str) -> str:
    """Return a pattern of a text in brackets, in which are others; what is not closed goes on."""
    inside = rf"[^{opening}{closing}]"
    pattern = rf"{opening}{inside}*+{closing}"
    for _ in range(24):
        pattern = rf"{opening}(?:{inside}|{pattern})*+{closing}"
    return rf"{pattern}|{opening}.*"


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_EXPANSION = (
    r"(?P<expansion>\$(?P<name>[A-Za-z_]\w*|[0-9@*#?!$-])"
    r"|\$\{(?P<long>[A-Za-z_]\w*|[0-9]+|[@*])(?P<all>\[[@*]\])?(?::?-(?P<default>[^${}`]*))?\}"
    r"|\$(?:" + _nested(r"\(", r"\)") + "|" + _nested(r"\{", r"\}") + ")|`[^`]*`)"
)
_INSIDE = re.sub(r"\?P<\w+>", "?:", _EXPANSION)
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r]+)|(?P<newline>\n)|(?P<end>[;|()]|&(?!>))|(?P<comment>#)"
    r"|(?P<place><[^<>=(\s][^<>\n]*>)|<<-?[ \t\r]*(?P<mark>['\"]?)(?P<heredoc>\w+)(?P=mark)"
    r"|(?P<redirection>&?[<>]+[&|]?[ \t\r]*(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s;|&()<>]*))"
    r"|\\(?:(?P<continued>\r?\n)|(?P<escaped>.?))|'(?P<single>[^']*)'"
    rf"|\"(?P<double>(?:[^\"\\$`]|\\.|{_INSIDE}|\$)*+)\""
    rf"|{_EXPANSION}|(?P<plain>[^\s;|()&<>\\'\"$`#]+|.)",
    re.DOTALL,
)
_IN_QUOTES = re.compile(rf"\\(?P<continued>\n)|\\(?P<escaped>[$`\"\\])|{_EXPANSION}|(?P<plain>[^\\$`]+|.)", re.DOTALL)
_EXPORTS = ("export", "local", "declare", "readonly", "typeset")
_OPENS = ("if", "case", "for", "while", "until", "select", "{", "function")
_CLOSES = ("fi", "esac", "done", "}")
_GOES_ON = ("then", "else", "elif", "do", "!", "time", "exec", "nohup")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MIXED = "as a list and a text"
_LARGEST = 2**63
_MAX_CHARACTERS = 1 << 22
"""Most characters that variables become: a script can double a variable in each line."""


class Word(str):
    """A word, with the number of its line. unknown: why only a shell knows its value, or empty."""

    line: int
    unknown: str
    values: list[Word] | None = None
    """Words of the list that an assignment ends in."""

    def __new__(cls, text: str, line: int, unknown: str = "") -> Word:
        word = super().__new__(cls, text)
        word.line, word.unknown = line, unknown
        return word


@dataclass
class Command:
    """A command's words. is_ended: by another operator than the end of its line. depth: of the
    conditions, loops and functions around it.
    """

    words: list[Word]
    is_ended: bool
    depth: int

    @property
    def is_assignment(self) -> bool:
        return all(_ASSIGNMENT.fullmatch(word) for word in self.words)


def read_script(text: str, line: int = 1) -> list[Command]:
    """Return the commands of a script. Raises ValueError, with the line, for a quotation mark that
    is not closed and for values without an end.

    line: number of the first line.
    """
    return list(_Reader(line).commands(text))


class _Reader:
    def __init__(self, line: int) -> None:
        self.line, self.depth = line, 0
        self.variables: dict[str, list[Word]] = {}
        self.put = 0
        """Characters that variables became so far."""
        self.fields: list[Word] = []
        """Words of the command so far, or of the list that is assigned in it."""
        self.part: str | None = None
        """The word so far; None between words."""
        self.unknown = ""
        self.outer: tuple[list[Word], str] | None = None
        """Words before a list, and the head of its assignment; None outside a list."""

    def commands(self, text: str) -> Iterator[Command]:
        at, heredocs = 0, list[str]()
        while at < len(text):
            match = _TOKEN.match(text, at)
            assert match is not None
            kind, found, at = match.lastgroup, match[0], match.end()
            if kind in ("newline", "end") and self.outer is None and not self._begins_list(found):
                yield from self._command(is_ended=kind == "end")
            elif kind == "comment" and self.part is None:
                at = text.find("\n", at) % (len(text) + 1)
            elif kind in ("heredoc", "redirection"):
                if self.part is not None and self.part.isdigit():
                    self.part = None
                self._end_of_word()
                heredocs += [match["heredoc"]] if kind == "heredoc" else []
            else:
                self._token(match)
            self.line += found.count("\n")
            while kind == "newline" and heredocs and at < len(text):
                end = text.find("\n", at) + 1 or len(text) + 1
                if text[at : end - 1].strip() == heredocs[0]:
                    del heredocs[0]
                at, self.line = end, self.line + 1
        if self.outer is not None:
            self._end_of_list(self.outer)
        yield from self._command(is_ended=False)

    def _begins_list(self, found: str) -> bool:
        return found == "(" and (self.part or "").endswith("=")

    def _token(self, match: re.Match[str]) -> None:
        """Take a token that does not end a command."""
        kind, found = match.lastgroup, match[0]
        if kind in ("blank", "newline"):
            self._end_of_word()
        elif self._begins_list(found) and self.outer is None:
            self.outer = self.fields, self.part or ""
            self.fields, self.part = [], None
        elif found == ")" and self.outer is not None:
            self._end_of_list(self.outer)
        elif kind == "double":
            self._add("")
            for inner in _IN_QUOTES.finditer(match["double"]):
                if inner.lastgroup == "expansion":
                    self._expand(inner, is_quoted=True)
                elif inner.lastgroup != "continued":
                    self._add(inner[inner.lastgroup or 0])
        elif kind == "expansion":
            self._expand(match, is_quoted=False)
        elif kind in ("escaped", "single"):
            self._add(match[kind])
        elif found in ("'", '"', "`"):
            raise ValueError(f"{self.line}: a quotation mark is not closed")
        elif kind != "continued":
            self._add(found)
            if kind == "place":
                self.unknown = f"{found} stands for a value of yours"

    def _end_of_list(self, outer: tuple[list[Word], str]) -> None:
        self._end_of_word()
        word = Word(outer[1], self.line)
        word.values, self.fields, self.outer = self.fields, [*outer[0], word], None

    def _command(self, *, is_ended: bool) -> Iterator[Command]:
        """End the command, and remember what it assigns."""
        self._end_of_word()
        words, self.fields = self.fields, []
        while words and words[0] in (*_OPENS, *_CLOSES, *_GOES_ON, *_EXPORTS):
            if words[0] in _OPENS:
                self.depth += 1
            if words[0] in _CLOSES:
                self.depth = max(0, self.depth - 1)
            words = [] if words[0] in ("for", "case", "select", "function") else words[1:]
        if words:
            command = Command(words, is_ended, self.depth)
            for word in words if command.is_assignment else ():
                self._assign(word)
            for name in words[1:] if words[0] == "unset" else ():
                self.variables.pop(name, None)
            yield command

    def _assign(self, word: Word) -> None:
        match = _ASSIGNMENT.fullmatch(word)
        assert match is not None
        name, more, value = match.groups()
        known, values = self.variables.get(name, []), word.values
        old = known if more else []
        is_mixed = len(known) > 1 or any(f"{name} is assigned {_MIXED}" in each.unknown for each in known)
        where = "inside a condition, loop or function" if self.depth else ""
        where = _MIXED if is_mixed and values is None else where
        if where:
            unknown = f"{name} is assigned {where} at line {word.line}"
            self.variables[name] = [Word(f"${name}", word.line, unknown)]
        elif values is not None:
            self.variables[name] = [*old, *values]
        else:
            unknown = next((each.unknown for each in (*old, word) if each.unknown), "")
            self.variables[name] = [Word("".join([*old, value]), word.line, unknown)]

    def _add(self, text: str) -> None:
        self.part = (self.part or "") + text

    def _end_of_word(self) -> None:
        if self.part is not None:
            self.fields.append(Word(self.part, self.line, self.unknown))
        self.part, self.unknown = None, ""

    def _expand(self, match: re.Match[str], *, is_quoted: bool) -> None:
        """Put the value of ``$...`` in. Outside quotes its blanks separate words."""
        raw, name, is_list = match[0], match["name"] or match["long"], bool(match["all"])
        values: list[Word] | None = None
        why = "only a shell expands it" if raw.startswith("${") else "nothing is run"
        if name:
            why, values = f"{name} is not assigned before line {self.line}", self.variables.get(name)
            if name in ("@", "*"):
                values = []  # a script without arguments
            elif (default := match["default"]) is not None and not "".join(values or ()):
                quoted = '"[^"]*"' if is_quoted else "\"[^\"]*\"|'[^']*'"
                values = [Word(re.sub(quoted, lambda found: found[0][1:-1], default), self.line)]
                is_quoted = is_quoted or values != [default]
            elif values is not None and not is_list:
                values = values[:1]
        elif raw.startswith("$((") and raw.endswith("))"):
            why, values = "only integers from 0 are calculated", self._calculate(raw[3:-2])
        is_assigned = _ASSIGNMENT.match(self.part or "") and all(
            word in _EXPORTS or _ASSIGNMENT.fullmatch(word) for word in self.fields
        )
        for number, value in enumerate([Word(raw, self.line, why)] if values is None else values):
            if number and is_list and not is_assigned:
                self._end_of_word()
            elif number:
                self._add(" ")
            self._put(value, is_quoted=is_quoted or bool(is_assigned))

    def _put(self, value: Word, *, is_quoted: bool) -> None:
        self.put += len(value) + 1
        if self.put > _MAX_CHARACTERS:
            raise ValueError(f"{self.line}: the values of variables are longer than {_MAX_CHARACTERS}")
        self.unknown = self.unknown or value.unknown
        for text in [value] if is_quoted or value.unknown else re.findall(r"\s+|\S+", value):
            if text.isspace() and not is_quoted:
                self._end_of_word()
            else:
                self._add(text)

    def _calculate(self, text: str) -> list[Word] | None:
        """Return the value of an expression of integers, None where it is another one."""
        name = r"\$?\{?([A-Za-z_]\w*)\}?"
        text = re.sub(name, lambda match: "".join(self.variables.get(match[1], ["?"])), text)
        if len(text) > 200 or "//" in text or "**" in text:
            return None
        try:
            tree = ast.parse(text.strip().replace("/", "//"), mode="eval")
            return [Word(str(_evaluate(tree.body)), self.line)]
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _evaluate(node: ast.expr) -> int:
    """Return the value of a node; one below 0 is no size of a model or a run."""
    match node:
        case ast.Constant(value=int(value)) if type(value) is int and value < _LARGEST:
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
            if 0 <= value < _LARGEST:
                return value
    raise ValueError("no expression of integers")

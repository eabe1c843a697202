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
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_HEAD = re.compile(r"[A-Za-z_]\w*\+?=")
_REFERENCE = re.compile(
    r"\$(?:(?P<name>[A-Za-z_]\w*|[0-9@*#?!$-])"
    r"|\{(?P<long>[A-Za-z_]\w*|[0-9]+|[@*])(?P<all>\[[@*]\])?(?::?-(?P<default>[^${}`]*))?\})"
)
_EXPORTS = ("export", "local", "declare", "readonly", "typeset")
_OPENS = ("if", "case", "for", "while", "until", "select", "{", "function")
_CLOSES = ("fi", "esac", "done", "}")
_GOES_ON = ("then", "else", "elif", "do", "!", "time", "exec", "nohup")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
_PLAIN = re.compile(r"[^\s;|()&<>\\'\"$`#]+")
_PLAIN_IN_QUOTES = re.compile(r"[^\n\\\"$`]+")
_LARGEST = 2**63
_MAX_CHARACTERS = 1 << 22
"""Most characters that variables become: a script can double a variable in each line."""


class Word(str):
    """A word, with the number of its line. unknown: why only a shell knows its value, or empty."""

    line: int = 0
    unknown: str = ""


def _word(text: str, line: int, unknown: str = "") -> Word:
    word = Word(text)
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
    return list(_Reader(text, line).commands())


@dataclass
class _Reader:
    text: str
    line: int
    at: int = 0
    depth: int = 0
    variables: dict[str, list[Word]] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    """Names of lists whose first value was assigned apart."""
    heredocs: list[str] = field(default_factory=list)
    fields: list[Word] = field(default_factory=list)
    """Words of the command so far."""
    part: str | None = None
    """The word so far; None between words."""
    unknown: str = ""
    put: int = 0
    """Characters that variables became so far."""

    def commands(self) -> Iterator[Command]:
        while self.at < len(self.text):
            found, is_ended = self._command()
            words = self._without_keywords(found)
            if words:
                command = Command(words, is_ended, self.depth)
                if command.is_assignment:
                    for word in words:
                        self._assign(word)
                for name in words[1:] if words[0] == "unset" else ():
                    self.variables.pop(name, None)
                    self.mixed.discard(name)
                yield command

    def _without_keywords(self, words: list[Word]) -> list[Word]:
        """Return the words of a simple command, and count what is around it."""
        while words and words[0] in (*_OPENS, *_CLOSES, *_GOES_ON, *_EXPORTS):
            if words[0] in _OPENS:
                self.depth += 1
            if words[0] in _CLOSES:
                self.depth = max(0, self.depth - 1)
            if words[0] in ("for", "case", "select", "function"):
                return []
            words = words[1:]
        return words

    def _assign(self, word: Word) -> None:
        match = _ASSIGNMENT.fullmatch(word)
        assert match is not None
        name, more, value = match.groups()
        known, values = self.variables.get(name, []), self._arrays.pop(name, None)
        if len(known) > 1 and values is None:
            self.mixed.add(name)
        where = "inside a condition, loop or function" if self.depth else ""
        where = "as a list and a text" if name in self.mixed else where
        old = known if more else []
        if where:
            unknown = f"{name} is assigned {where} at line {word.line}"
            self.variables[name] = [_word(f"${name}", word.line, unknown)]
        elif values is not None:
            self.variables[name] = [*old, *values]
        else:
            unknown = next((each.unknown for each in (*old, word) if each.unknown), "")
            self.variables[name] = [_word("".join([*old, value]), word.line, unknown)]

    def _command(self) -> tuple[list[Word], bool]:
        """Read up to the end of a command."""
        self.fields, self.part, self.unknown = [], None, ""
        self._arrays: dict[str, list[Word]] = {}
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\n":
                self._end_of_word()
                self._next_line()
                return self.fields, False
            if char in ";|()" or (char == "&" and self.text[self.at + 1 : self.at + 2] != ">"):
                if char == "(" and self.part is not None and self.part[-1:] == "=":
                    self._array()
                    continue
                self._end_of_word()
                self.at += 1
                return self.fields, True
            self._character(char)
        self._end_of_word()
        return self.fields, False

    def _character(self, char: str) -> None:
        if char in " \t\r":
            self._end_of_word()
            self.at += 1
        elif char == "#" and self.part is None:
            while self.at < len(self.text) and self.text[self.at] != "\n":
                self.at += 1
        elif char in "<>" or self.text.startswith("&>", self.at):
            self._redirection()
        elif char == "\\":
            self._escape(self.text[self.at + 1 : self.at + 2])
        elif char == "'":
            self._add(self._until("'", self.at + 1))
        elif char == '"':
            self._quoted()
        elif char in "$`":
            self._expand(is_quoted=False)
        else:
            self._plain(_PLAIN)

    def _plain(self, kind: re.Pattern[str]) -> None:
        """Read characters without a meaning, at least one."""
        found = kind.match(self.text, self.at)
        text = found[0] if found else self.text[self.at]
        self._add(text)
        self.at += len(text)

    def _add(self, text: str) -> None:
        self.part = (self.part or "") + text

    def _end_of_word(self) -> None:
        if self.part is not None:
            self.fields.append(_word(self.part, self.line, self.unknown))
        self.part, self.unknown = None, ""

    def _next_line(self) -> None:
        """Go to the next line, behind texts of ``<<MARK``."""
        self.at, self.line = self.at + 1, self.line + 1
        while self.heredocs:
            mark = self.heredocs.pop(0)
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                found, self.at, self.line = self.text[self.at : end], end + 1, self.line + 1
                if found.strip() == mark:
                    break

    def _escape(self, following: str) -> None:
        if following == "\n":
            self.line += 1
        elif following == "\r":  # a file with the ends of lines of Windows
            self.at += 1
            self.line += 1
        else:
            self._add(following)
        self.at += 2

    def _until(self, mark: str, start: int) -> str:
        end = self.text.find(mark, start)
        if end < 0:
            raise ValueError(f"{self.line}: a quotation mark is not closed")
        found = self.text[start:end]
        self.at, self.line = end + 1, self.line + found.count("\n")
        return found

    def _quoted(self) -> None:
        start, self.at = self.line, self.at + 1
        self._add("")
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                self._escape(self.text[self.at + 1])
            elif char in "$`":
                self._expand(is_quoted=True)
            else:
                self.line += char == "\n"
                self._plain(_PLAIN_IN_QUOTES)
        raise ValueError(f"{start}: a quotation mark is not closed")

    def _array(self) -> None:
        """Read the words of ``NAME=(...)`` up to the bracket."""
        outer, head = self.fields, self.part or ""
        self.fields, self.part, self.at = [], None, self.at + 1
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] == "\n":
                self._end_of_word()
                self._next_line()
            else:
                self._character(self.text[self.at])
        self._end_of_word()
        values, self.at = self.fields, self.at + 1
        self._arrays[head.rstrip("+=")] = values
        self.fields, self.part = outer, head

    def _redirection(self) -> None:
        """Leave out ``> file``, ``2>&1`` and ``<<MARK``. ``<text>`` is a place to fill in."""
        rest = self.text[self.at : self.text.find("\n", self.at) % (len(self.text) + 1)]
        placeholder = re.match(r"<[^<>=(\s][^<>]*>", rest)
        if placeholder:
            self._add(placeholder[0])
            self.unknown = f"{placeholder[0]} stands for a value of yours"
            self.at += len(placeholder[0])
            return
        if self.part is not None and self.part.isdigit():
            self.part = None
        self._end_of_word()
        heredoc = re.match(r"<<-?\s*(['\"]?)(\w+)\1", rest)
        if heredoc:
            self.heredocs.append(heredoc[2])
            self.at += len(heredoc[0])
        else:
            found = re.match(r"(&?[<>]+[&|]?|<<<)\s*(\"[^\"]*\"|'[^']*'|[^\s;|&()<>]*)", rest)
            self.at += len(found[0]) if found else 1

    def _expand(self, *, is_quoted: bool) -> None:
        """Put the value of ``$...`` in. Outside quotes its blanks separate words."""
        start = self.at
        if self.text.startswith("$((", start):
            raw = self._bracketed(start + 1)
            found = self._calculate(raw[2:-2]) if raw.endswith("))") else None
            values = None if found is None else [found]
            self._put(f"${raw}", values, "only integers are calculated", is_quoted)
        elif self.text[start] == "`":
            self._put(f"`{self._until('`', start + 1)}`", None, "nothing is run", is_quoted)
        elif self.text.startswith("$(", start):
            self._put(f"${self._bracketed(start + 1)}", None, "nothing is run", is_quoted)
        elif match := _REFERENCE.match(self.text, start):
            self.at = match.end()
            name = match["name"] or match["long"]
            values = self.variables.get(name)
            if name in ("@", "*"):
                values = []  # a script without arguments
            elif match["default"] is not None and not "".join(values or ()):
                values = [_word(match["default"], self.line)]
            elif values is not None and not match["all"]:
                values = values[:1]
            why = f"{name} is not assigned before it in this file"
            self._put(match[0], values, why, is_quoted, is_list=bool(match["all"]))
        elif self.text.startswith("${", start):
            self.at = start + 1
            raw = self._bracketed(start + 1, "{", "}")
            self._put(f"${raw}", None, "only a shell expands it", is_quoted)
        else:
            self._add("$")
            self.at += 1

    def _put(
        self, raw: str, values: list[Word] | None, why: str, is_quoted: bool, is_list: bool = False
    ) -> None:
        is_assigned = _HEAD.match(self.part or "") and all(
            word in _EXPORTS or _ASSIGNMENT.fullmatch(word) for word in self.fields
        )
        if values is None:
            values = [_word(raw, self.line, why)]
        for number, value in enumerate(values):
            if number and is_list and not is_assigned:
                self._end_of_word()
            elif number:
                self._add(" ")
            self._put_text(value, is_quoted or bool(is_assigned))

    def _put_text(self, value: Word, is_quoted: bool) -> None:
        self.put += len(value) + 1
        if self.put > _MAX_CHARACTERS:
            raise ValueError(
                f"{self.line}: the values of variables are longer than {_MAX_CHARACTERS}"
            )
        if is_quoted or value.unknown:
            self._add(value)
            self.unknown = self.unknown or value.unknown
            return
        for text in re.findall(r"\s+|\S+", value):
            if text.isspace():
                self._end_of_word()
            else:
                self._add(text)

    def _bracketed(self, start: int, opening: str = "(", closing: str = ")") -> str:
        """Read up to the bracket that closes the one at ``start``."""
        depth, self.at = 1, start + 1
        while depth and self.at < len(self.text):
            depth += (self.text[self.at] == opening) - (self.text[self.at] == closing)
            self.at += 1
        raw = self.text[start : self.at]
        self.line += raw.count("\n")
        return raw

    def _calculate(self, text: str) -> Word | None:
        """Return the value of an expression of integers, None where it is another one."""

        def value_of(match: re.Match[str]) -> str:
            return "".join(self.variables.get(match[1], ["?"]))

        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value_of, text)
        if len(text) > 200 or "//" in text or "**" in text:
            return None
        try:
            tree = ast.parse(text.strip().replace("/", "//"), mode="eval")
            return _word(str(_evaluate(tree.body)), self.line)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int and value < _LARGEST:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
            if abs(value) < _LARGEST:
                return value
    raise ValueError("no expression of integers")

"""Command lines of other systems as plain mappings: ``--num-layers 24 --fp16`` becomes num_layers:
24, fp16: true.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.load import parse_scalar
from common.errors import ConfigError
from common.files import open_input, reading
from common.systems.dialect import Only, Switch, Table, To

MOST_BYTES = 1 << 20
"""Largest file of flags."""

_SHELL = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "&>", "<", "2>", "2>&1", "1>", "|&"})
"""Words of the shell that end a command's arguments."""


def read_flags(
    words: Sequence[str], where: str, texts: Collection[str] = ()
) -> tuple[dict[str, Any], dict[tuple[str | int, ...], str], dict[str, str]]:
    """Return the value and the place of each flag, and a remark on each that a later one replaces.
    A flag without a value is true; several values become a list. As in argparse, the last of two
    equal flags counts.

    texts: flags whose value is text and is not parsed as YAML. where: the file, or "command line".
    Raises ConfigError for a word without a flag.
    """
    tree: dict[str, Any] = {}
    sources: dict[tuple[str | int, ...], str] = {}
    replaced: dict[str, str] = {}
    number = 0
    while number < len(words):
        word = words[number]
        if not _is_flag(word):
            raise ConfigError(
                f"{_place(where, word)}: {word!r} stands where a flag is expected; flags begin with"
                " --"
            )
        name, equals, text = word.lstrip("-").partition("=")
        number += 1
        values = [text] if equals else []
        while not equals and number < len(words) and not _is_flag(words[number]):
            values.append(str(words[number]))
            number += 1
        key = name.replace("-", "_")
        place = f"{_place(where, word)}: --{name}"
        value = " ".join(values) if values and key in texts else _value(values, place)
        if key in tree and tree[key] != value:
            replaced[f"--{name} {tree[key]}"] = f"{place} {value} is given later and counts"
        tree[key] = value
        sources[key,] = place
    return tree, sources, replaced


def check_values(
    tree: Mapping[str, Any],
    sources: Mapping[tuple[str | int, ...], str],
    table: Table,
    valued: Container[str],
    switches: Container[str],
) -> None:
    """Check that flags have their values and switches have none. Raises ConfigError.

    valued, switches: flags with and without a value that have no rule in ``table``.
    """
    for key, value in tree.items():
        rule = table.get(key)
        takes = (isinstance(rule, To) and not isinstance(rule.change, Switch)) or (
            isinstance(rule, Only) and rule.values and True not in rule.values
        )
        if value is True and (takes or key in valued):
            raise ConfigError(f"{sources[key,]}: needs a value; give one, or leave the flag out")
        if value is not True and key in switches:
            raise ConfigError(
                f"{sources[key,]}: takes no value, found {value!r}; leave the value out, or the"
                " flag"
            )


class FlagWord(str):
    """A word of a file, with the number of its line."""

    line: int = 0


def _place(where: str, word: str) -> str:
    return f"{where}:{word.line}" if isinstance(word, FlagWord) else where


def read_flag_file(path: Path) -> list[str]:
    """Return the flags in a file: the second part of ``read_command``."""
    return read_command(path)[1]


def read_command(path: Path) -> tuple[str, list[str]]:
    """Return the program that a file of flags starts, empty where it does not say, and the words of
    its flags: one or several a line, ``\\`` at a line's end, ``#`` for remarks.

    Raises ConfigError for a file that cannot be read, and for variables, which only the shell
    knows.
    """
    with open_input(path, ConfigError) as file, reading(path, ConfigError):
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: is larger than {MOST_BYTES} bytes; give a file of flags")
    words: list[FlagWord] = []
    number = 0
    try:
        for number, line in enumerate(raw.decode().splitlines(), 1):
            for text in shlex.split(line.rstrip().removesuffix("\\"), comments=True):
                words.append(FlagWord(text))
                words[-1].line = number
    except ValueError as error:
        raise ConfigError(
            f"{path}:{number or 1}: is not a list of flags: {error}; close each quotation mark in"
            " its line, and write UTF-8"
        ) from None
    for word in words:
        if "$" in word or "`" in word:
            raise ConfigError(
                f"{path}:{word.line}: {word[:80]}: variables are the shell's; write their values,"
                " or give the flags behind --"
            )
    program = ""
    first = next((number for number, word in enumerate(words) if _is_flag(word)), len(words))
    for number, word in enumerate(words):  # a launcher before the program has flags of its own
        if word.endswith(".py") or (number and words[number - 1] == "-m"):
            first, program = number + 1, Path(word).name
    last = next((number for number, word in enumerate(words) if word in _SHELL), len(words))
    return program, list(words[first : max(first, last)])


def _is_flag(word: str) -> bool:
    """Tell whether a word is a flag; a negative number is a value."""
    return word.startswith("--") or (
        word.startswith("-") and len(word) > 1 and not word[1].isdigit() and word[1] != "."
    )


def _value(values: list[str], where: str) -> Any:
    if not values:
        return True
    scalars = [parse_scalar(value, where) for value in values]
    return scalars[0] if len(scalars) == 1 else scalars

"""Command lines of other systems as plain mappings: ``--num-layers 24 --fp16`` becomes num_layers:
24, fp16: true.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config.load import parse_scalar
from common.errors import ConfigError
from common.files import open_input, reading

MOST_BYTES = 1 << 20
"""Largest file of flags."""


def read_flags(
    words: Sequence[str], where: str
) -> tuple[dict[str, Any], dict[tuple[str | int, ...], str]]:
    """Return each flag's value, and where it stands. A flag without a value is true, one with
    several a list.

    Raises ConfigError for a word that belongs to no flag, and a flag given twice with different
    values.
    """
    tree: dict[str, Any] = {}
    sources: dict[tuple[str | int, ...], str] = {}
    number = 0
    while number < len(words):
        word = words[number]
        if not _is_flag(word):
            raise ConfigError(
                f"{where}: {word!r} stands where a flag is expected; flags begin with --"
            )
        name, equals, text = word.lstrip("-").partition("=")
        number += 1
        values = [text] if equals else []
        while not equals and number < len(words) and not _is_flag(words[number]):
            values.append(words[number])
            number += 1
        key = name.replace("-", "_")
        value = _value(values, f"{where}: --{name}")
        if key in tree and tree[key] != value:
            raise ConfigError(
                f"{where}: --{name} is given twice, as {tree[key]} and {value}; keep one"
            )
        tree[key] = value
        sources[key,] = f"{where}: --{name}"
    return tree, sources


def read_flag_file(path: Path) -> list[str]:
    """Return the words of a file of flags: one or several a line, ``\\`` at a line's end, ``#`` for
    remarks.

    Raises ConfigError for a file that cannot be read, and for variables, which only the shell
    knows.
    """
    with open_input(path, ConfigError) as file, reading(path, ConfigError):
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: is larger than {MOST_BYTES} bytes; give a file of flags")
    try:
        words = shlex.split(raw.decode().replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(
            f"{path}: is not a list of flags: {error}; close each quotation mark, and write UTF-8"
        ) from None
    for word in words:
        if "$" in word or "`" in word:
            raise ConfigError(
                f"{path}: {word[:80]}: variables are the shell's; write their values, or give the"
                " flags behind --"
            )
    first = next((number for number, word in enumerate(words) if _is_flag(word)), len(words))
    return words[first:]


def _is_flag(word: str) -> bool:
    """Negative numbers are values."""
    return word.startswith("--") or (
        word.startswith("-") and len(word) > 1 and not word[1].isdigit() and word[1] != "."
    )


def _value(values: list[str], where: str) -> Any:
    if not values:
        return True
    scalars = [parse_scalar(value, where) for value in values]
    return scalars[0] if len(scalars) == 1 else scalars

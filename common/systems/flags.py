"""Command lines of other systems as plain mappings: ``--num-layers 24 --fp16`` becomes num_layers: 24, fp16: true."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from common.config.aliases import Sources
from common.dialects.megatron import OTHER_PROGRAMS
from common.dialects.rules import ByHand, Fixed, MapTo, Rule, Switch, Table
from common.errors import ConfigError
from common.structured_files import read_text
from common.systems.dialect import read_word
from common.systems.shell_script import Command, Word, read_script

_MAX_BYTES = 1 << 20
"""Largest file of flags."""
COMMAND_LINE = "command line"
_WRITTEN = "# flags of the command line of "
"""First words of a file of a command line's flags, before the program."""


def read_flags(words: Sequence[str], where: str, table: Table) -> tuple[dict[str, Any], Sources, dict[str, str]]:
    """Return the value and the place of each flag, and a remark on each that a later one replaces. A flag without a
    value is true; several values become a list. As in argparse, the last of two equal flags counts.

    where: the file, or "command line". Raises ConfigError for a word without a flag.
    """
    tree: dict[str, Any] = {}
    sources: Sources = {}
    replaced: dict[str, str] = {}
    given: list[tuple[str, list[str]]] = []
    for word in words:
        if _is_flag(word):
            given.append((word, []))
        elif given and "=" not in given[-1][0]:
            given[-1][1].append(str(word))
        else:
            raise ConfigError(f"{_place(where, word)}: {word!r} stands where a flag is expected; flags begin with --")
    for word, values in given:
        name, equals, text = word.lstrip("-").partition("=")
        values = [text] if equals else values
        key = name.replace("-", "_")
        place = f"{_place(where, word)}: --{name}"
        rule = table.get(key)
        if values and isinstance(rule, ByHand) and rule.text:
            value: Any = " ".join(values)
        else:
            scalars = [read_word(each, rule, place) for each in values]
            value = scalars[0] if len(scalars) == 1 else scalars or True
        if key in tree and tree[key] != value:
            replaced[f"--{name} {tree[key]}"] = f"{place} {value} is given later and counts"
        tree[key] = value
        sources[key,] = place
    return tree, sources, replaced


def check_value(value: Any, rule: Rule | None, place: str) -> None:
    """Check that a flag has its value and a switch has none. Raises ConfigError."""
    match rule:
        case MapTo(change=change):
            takes = not isinstance(change, Switch)
        case ByHand(switch=switch):
            takes = not switch
        case Fixed(values=values):
            takes = bool(values) and True not in values
        case _:
            return
    if value is True and takes:
        raise ConfigError(f"{place}: needs a value; give one, or leave the flag out")
    if value is not True and isinstance(rule, ByHand) and not takes:
        raise ConfigError(f"{place}: takes no value, found {value!r}; leave the value out, or the flag")


def _place(where: str, word: str) -> str:
    return f"{where}:{word.line}" if isinstance(word, Word) else where


def write_flag_file(file: IO[str], program: str, words: Sequence[str]) -> None:
    """Write flags of a command line, which ``read_command`` then calls by that name."""
    file.write(f"{_WRITTEN}{program}\n{shlex.join(words)}\n")


def read_command(path: Path) -> tuple[str, str, list[str]]:
    """Return where the flags of a file come from, the program that it starts, empty where it does
    not say, and the words of its flags. The file is a script, or has one or several flags a line.

    Raises ConfigError for a program that takes other flags, for a file that cannot be read, and for values that only a
    shell knows.
    """
    text = read_text(path, limit=_MAX_BYTES)
    try:
        if text.startswith(_WRITTEN):
            program, _, flags = text.removeprefix(_WRITTEN).partition("\n")
            return COMMAND_LINE, program, shlex.split(flags)
        program, words = _find_flags(_all_commands(read_script(text)), path)
    except ValueError as error:
        raise ConfigError(f"{path}:{error}; is this a list of flags?") from None
    for name, why in OTHER_PROGRAMS.items():
        if f"/{program}".endswith(f"/{name}"):
            raise ConfigError(f"{path}: {name} is another program: {why}")
    for word in words:
        if word.unknown:
            raise ConfigError(
                f"{path}:{word.line}: {word[:80]}: {word.unknown}; write the value. Or put echo"
                " before the command, run the script, and give a file of what it prints"
            )
    return str(path), Path(program).name, list(words)


def _all_commands(commands: Iterable[Command]) -> Iterator[Command]:
    """Yield commands, with those of ``sh -c "..."`` in its place."""
    for command in commands:
        words = command.words
        for shell, option, script in zip(words, words[1:], words[2:], strict=False):
            if Path(shell).name in ("sh", "bash") and option == "-c":
                yield from _all_commands(read_script(script, script.line))
                break
        else:
            yield command


def _find_flags(commands: Iterable[Command], path: Path) -> tuple[str, list[Word]]:
    """Return the program with most flags, and their words. Flags in lines of their own belong to
    the command before them.

    Raises ConfigError where a condition decides which program starts.
    """
    found: list[tuple[str, list[Word], int]] = []
    is_open = False  # whether the next line may continue the flags
    unknown: list[Word] = []
    for command in commands:
        words = command.words
        if words[0] in ("[", "[[", "test"):
            continue
        if words[0].unknown and not command.is_assignment:
            unknown = unknown or words
        programs = [
            number
            for number, word in enumerate(words)  # a launcher before the program has flags too
            if word.endswith(".py") or (number and words[number - 1] == "-m")
        ]
        marked = [number for number, word in enumerate(words) if _is_flag(word)]
        if programs and not command.is_assignment:
            last = programs[-1]
            found.append((words[last], words[last + 1 :], command.depth))
        elif is_open and (not found[-1][0] or marked[:1] == [0]):
            found[-1][1].extend(words)
        elif marked and not command.is_assignment:
            found.append(("", words[marked[0] :], command.depth))
        else:
            continue
        is_open = not command.is_ended
    if any(program for program, _, _ in found):
        found = [each for each in found if each[0]]
    if not found:  # a command that only a shell knows may hold them
        return "", unknown
    program, flags, depth = max(found, key=lambda each: sum(map(_is_flag, each[1])))
    if depth and sum(each[0] == program for each in found) > 1:
        raise ConfigError(f"{path}: a condition says which of several commands starts {program}; keep one of them")
    return program, flags


def _is_flag(word: str) -> bool:
    """Tell whether a word is a flag; a negative number is a value."""
    return word.startswith("--") or (
        word.startswith("-") and len(word) > 1 and not word[1].isdigit() and word[1] != "."
    )

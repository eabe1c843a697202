"""Options of a program, declared as the fields of a dataclass.

The type of a field says how its words are read. bool is a switch, Literal has choices, and a tuple takes several
values. An option that is left out is the field's default; without one it is None, off or empty.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from common.errors import ConfigError
from common.whole_numbers import whole_number

Request = TypeVar("Request")


def flag(
    text: str,
    *names: str,
    default: Any = None,
    group: str | None = None,
    required: bool = False,
    positional: bool = False,
    **settings: Any,
) -> Any:
    """Return a field for an option.

    text: its help, behind ``METAVAR: ``; a default is added to it. names: in place of the field's own name. group:
    title under which this option and those that follow are listed. settings: argparse's, of what the type does not say.
    """
    if "metavar" not in settings and (found := re.match(r"([^a-z\s]\S*): ", text)):
        settings["metavar"], text = found[1], text[found.end() :]
    metadata = {"flag": (text, names, group, positional, settings)}
    return field(default=MISSING if required else default, metadata=metadata)


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return argparse's type of a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        number = whole_number(text)
        if number is None or not least <= number <= (number if most is None else most):
            expected = f"of {least} or more" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number {expected}")
        return number

    return read


class Parser(argparse.ArgumentParser):
    """Parser that takes ``--two-words`` for ``--two_words`` and the other way round. It answers a wrong word with the
    error, without its whole usage.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.names: dict[str, str] = {}
        """Each option as it is declared, by its name with dashes."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(word) for word in words], namespace)

    def _spelled(self, word: str) -> str:
        """Return a word with the name of its option as it was declared."""
        name, equals, value = word.partition("=")
        return self.names.get(name.replace("_", "-"), name) + equals + value

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {ConfigError(message)}\n{self.prog} --help explains the options\n")


def make_parser(about: str | None, request: type | None = None, *, dashes: bool = False, **settings: Any) -> Parser:
    """Return a parser whose help begins with ``about`` as it is written.

    request: dataclass with the options. dashes: write ``--two-words``, not ``--two_words``.
    """
    parser = Parser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, **{"allow_abbrev": False, **settings}
    )
    if request is None:
        return parser
    types, place = get_type_hints(request), None
    for each in fields(request):
        if "flag" in each.metadata:
            _, names, group, positional, _ = each.metadata["flag"]
            place = parser.add_argument_group(group) if group else place or parser
            if not names:
                names = (each.name if positional else f"--{each.name}",)
                names = tuple(name.replace("_", "-") for name in names) if dashes else names
            place.add_argument(*names, **_settings(types[each.name], each))
            parser.names |= {name.replace("_", "-"): name for name in names if name.startswith("--")}
    return parser


def parse(request: type[Request], words: Sequence[str] | None, about: str | None, **settings: Any) -> Request:
    """Return the request of a command line, or raise what the dataclass raises.

    Ends the process with exit code 2 for words that are not options.
    """
    found = vars(make_parser(about, request, **settings).parse_intermixed_args(words))
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return request(**found | lists)


def _settings(kind: Any, each: Field[Any]) -> dict[str, Any]:
    """Return argparse's settings for a field of this type."""
    text, _, _, positional, given = each.metadata["flag"]
    settings: dict[str, Any] = {} if positional else {"dest": each.name, "required": each.default is MISSING}
    shown = default = None if each.default is MISSING else each.default
    if NoneType in get_args(kind):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        if "nargs" not in given:
            settings["action"] = "append"
        default = list(default or ())
        shown = " ".join(map(str, default))
    if kind is bool:
        default = bool(default)
        settings["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    elif kind is not str:
        settings["type"] = kind
    if shown not in (None, False, "") and "(default" not in text and text != argparse.SUPPRESS:
        text += f" (default: {shown})"
    return {**settings, "default": default, "help": text.replace("%", "%%"), **given}

"""Rules for the keys of another system's configuration.

A table has one rule for each dotted key of theirs. ``common.systems.dialect`` applies it to a file
of theirs. ``common.config.hints`` takes the hint of a rule where a file of ours has the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class MapTo:
    """Rule: the value becomes that of our key ``key``, converted by ``change``. ``change`` raises
    ValueError with the values that it expects.

    hint: what to write in a file of ours; ``key`` where it is empty.
    """

    key: str
    change: Callable[[Any], Any] = _same
    hint: str = ""


@dataclass(frozen=True)
class ByHand:
    """Rule: a function of the system's own translates the key.

    hint: what to write in a file of ours, empty for nothing. switch: a flag without a value. text:
    the words of a flag are one text.
    """

    hint: str = ""
    switch: bool = False
    text: bool = False


@dataclass(frozen=True)
class Ignored:
    """Rule: the key has no effect here, for the reason ``why``. hint: as that of ``MapTo``."""

    why: str
    hint: str = ""


@dataclass(frozen=True)
class Fixed:
    """Rule: these values change nothing here. For any other, ``instead`` says what to do."""

    values: tuple[Any, ...]
    instead: str
    hint: str = ""


Rule = MapTo | ByHand | Ignored | Fixed
Table = Mapping[str, Rule]
"""Rules by dotted key; ``section.*`` and ``prefix_*`` stand for all keys that begin so and have no
rule of their own.
"""
Defaults = Mapping[str, Any]
"""Their values of dotted keys that a file leaves out, in their words."""

_LARGE = 1e300
"""Bound that is larger than any number of a configuration."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def each(rule: Rule, names: str, prefix: str = "") -> dict[str, Rule]:
    """Return one rule for many keys: ``prefix`` and each of the words of ``names``."""
    return dict.fromkeys((prefix + name for name in names.split()), rule)


def same(section: str, names: str, prefix: str = "", change: Callable[[Any], Any] = _same) -> dict[str, Rule]:
    """Return rules for keys with the names of ours in ``section``."""
    return {prefix + name: MapTo(f"{section}.{name}", change) for name in names.split()}


def within(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under ``prefix``, a dotted path: rules or defaults of a section."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def has_rule(key: str, table: Table) -> bool:
    return key in table or any(name.endswith("*") and key.startswith(name[:-1]) for name in table)


def is_number(value: Any) -> bool:
    """Tell whether a value is a number that a configuration may have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGE


def one_of(**names: Any) -> Callable[[Any], Any]:
    """Return a change by a table of values, compared by their text."""

    def change(value: Any) -> Any:
        if str(value) not in names:
            raise ValueError(f"expected {' or '.join(names)}")
        return names[str(value)]

    return change


@dataclass(frozen=True)
class Switch:
    """Change of a flag without a value into ``meaning``."""

    meaning: Any

    def __call__(self, value: Any) -> Any:
        if value is not True:
            raise ValueError("takes no value; leave the value out, or the flag")
        return self.meaning


def listed(value: Any) -> list[Any]:
    """Change a value into a list; a single one becomes a list of one."""
    return value if isinstance(value, list) else [value]


def joined(value: Any) -> str:
    """Change the shares of a split into one text: ``969, 30, 1``, ``[969, 30, 1]`` or a list into ``969,30,1``."""
    return ",".join(map(str, listed(value))).replace(" ", "").strip("[]")


def number(value: Any) -> float:
    """Change a value into a float."""
    if not is_number(value):
        raise ValueError("expected a number")
    return float(value)


def above_zero(instead: str) -> Callable[[Any], float]:
    """Return a change into a float above 0. instead: what to know, or to do, for 0."""

    def change(value: Any) -> float:
        if not number(value) > 0:
            raise ValueError(f"expected a number above 0; {instead}")
        return float(value)

    return change


def whole(value: Any) -> int:
    """Change a value into a whole number. 500.0 is one too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise ValueError("expected a whole number")
    return int(value)


def off(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change whose 0 is off: our key is left out."""
    return lambda value: change(value) or None

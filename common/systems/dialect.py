"""Translation of another system's configuration by its table of rules, and a record of the
result. A key without a rule is refused.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from common.config.aliases import Sources
from common.config.load import flatten, read_value, read_with_bases, read_yaml
from common.dialects.rules import ByHand, Defaults, Fixed, Ignored, MapTo, Rule, Table, is_number
from common.errors import ConfigError
from common.structured_files import kind_of


def read_word(word: str, rule: Rule | None, where: str) -> Any:
    """Return the value of a word of a command line: the word itself where the key of ours takes
    text, else what it is in YAML. Raises ConfigError.
    """
    return read_value(word, tuple(rule.key.split(".")) if isinstance(rule, MapTo) else (), where)


def read_foreign(
    path: Path, base: str, sections: Collection[str] = (), text: str | None = None
) -> tuple[dict[str, Any], Sources]:
    """Return a file of another system merged over the files that its key ``base`` names, section
    by section. Raises ConfigError.

    sections: keys at the top that the system has. Another one is left out if aliases use its anchors. text: content of
    ``path``, if it has been read.
    """

    def read(file: Path) -> tuple[dict[str, Any], Sources]:
        carriers: set[str] = set()
        own, sources = read_yaml(file, carriers=carriers, text=text if file is path else None)
        for name in carriers if sections else ():
            if not difflib.get_close_matches(name, sections, n=1, cutoff=0.75):  # it may be misspelled
                own.pop(name, None)
        return own, sources

    return read_with_bases(path, base, read, _merge)


def _merge(target: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Merge sections; FleetX's ``_inherited_: False`` in a section replaces the base's section."""
    for key, value in other.items():
        if not isinstance(value, Mapping):
            target[key] = value
            continue
        if value.get("_inherited_") is False or not isinstance(target.get(key), dict):
            target[key] = {}
        _merge(target[key], {name: item for name, item in value.items() if name != "_inherited_"})


@dataclass
class Translation:
    """Configuration of ours while it is translated.

    sources: the place of each key. origins: their key for each key of ours. without_effect: their
    keys that have none, each with its reason.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    sources: Sources = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    without_effect: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any, where: str = "", theirs: str = "") -> None:
        """Set a key of ours. Raises ConfigError where another key of theirs has set it to another value."""
        *sections, name = key.split(".")
        at = self.tree
        for section in sections:
            at = at.setdefault(section, {})
        path = tuple(key.split("."))
        if name in at and at[name] != value and self.origins.get(key):
            other = self.sources.get(path, where)
            place = f" ({other})" if other != where else ""
            raise ConfigError(
                f"{where}: {theirs} makes {key}={value!r}, and {self.origins[key]} makes it"
                f" {at[name]!r}{place}; keep one of them"
            )
        at[name] = value
        self.sources[path] = where
        self.origins[key] = theirs

    def put(self, key: str, value: Any, theirs: ForeignKeys, name: str) -> None:
        """Set a key of ours to what their key ``name`` becomes. Raises ConfigError as ``set``."""
        self.set(key, value, theirs.where(name), theirs.named(name))

    def get(self, key: str, default: Any = None) -> Any:
        at: Any = self.tree
        for name in key.split("."):
            if not isinstance(at, dict) or name not in at:
                return default
            at = at[name]
        return at

    def settle_end_of_text(self, token: int) -> None:
        """Name the token of data.eod_mask_loss, which is theirs. A smaller vocabulary does not have
        it, unless data.tokenizer says which one it has.
        """
        size = self.get("model.vocab_size")
        if not self.get("data.eod_mask_loss") or not isinstance(size, int):
            return
        if self.get("data.eod_id") is None and size > token:
            self.set("data.eod_id", token)
        elif self.get("data.eod_id") is None and self.get("data.tokenizer") is None:
            self.drop("data.eod_mask_loss", f"the vocabulary has {size} tokens, and its end of text is {token}")

    def drop(self, key: str, why: str) -> None:
        """Remove a key or a section that has no effect. Values of the command line stay."""
        section, _, name = key.rpartition(".")
        at = self.get(section) if section else self.tree
        if not isinstance(at, dict) or name not in at or self.sources.get(tuple(key.split("."))) == "command line":
            return
        at.pop(name)
        for own, theirs in self.origins.items():
            if theirs and (own == key or own.startswith(f"{key}.")):
                self.note(theirs, why)

    def note(self, theirs: str, why: str) -> None:
        self.without_effect[theirs] = why

    def note_given(self, theirs: ForeignKeys, key: str, why: str) -> None:
        """Note that a key of theirs has no effect, unless it was left out."""
        if theirs.named(key):
            self.note(key, why)

    def leave_out(self, theirs: ForeignKeys, key: str, why: str) -> None:
        """Take a key of theirs that has no effect beside others, and note it if it was given."""
        theirs.take(key)
        self.note_given(theirs, key, why)


class ForeignKeys:
    """The keys of another system, which rules read one by one."""

    def __init__(self, system: str, tree: Mapping[str, Any], sources: Sources, defaults: Defaults) -> None:
        self.system, self.defaults, self._sources = system, defaults, sources
        self.left = dict(flatten(tree))
        """Keys that no rule has read yet, and their values."""
        self.names = tuple(self.left)
        self._given = {key for key, value in self.left.items() if value is not None and value != ""}

    def peek(self, key: str, default: Any = None) -> Any:
        """Return the value of a key. Where it is absent, null or an empty text, it is their
        default, and else ``default``.
        """
        value = self.left.get(key)
        return self.defaults.get(key, default) if value is None or value == "" else value

    def is_left_out(self, key: str) -> bool:
        """Tell whether a file does not have a key, or has no value for it."""
        return key not in self._given

    def named(self, key: str) -> str:
        """Return the key as the origin of ours; empty where it is left out."""
        return key if key in self._given else ""

    def take(self, key: str, default: Any = None) -> Any:
        value = self.peek(key, default)
        self.left.pop(key, None)
        return value

    def take_number(self, key: str, default: float | None = None) -> Any:
        """Take a value that is a number, not below 0. Raises ConfigError for any other."""
        value = self.take(key, default)
        if value is not None and not (is_number(value) and value >= 0):
            self.refuse(key, value, "expected a number that is not below 0")
        return value

    def take_count(self, key: str, least: int = 1) -> Any:
        """Take a whole number, at least ``least``. Raises ConfigError for any other value."""
        value = self.peek_count(key, least=least)
        self.left.pop(key, None)
        return value

    def peek_count(self, key: str, default: int | None = None, least: int = 1) -> Any:
        """Return the value of ``take_count`` without taking it."""
        value = self.peek(key, default)
        if value is not None and (type(value) is not int or value < least):
            self.refuse(key, value, f"expected a whole number above {least - 1}")
        return value

    def where(self, key: str) -> str:
        """Return ``file:line`` of a key, or of its section."""
        path = tuple(key.split("."))
        return next(
            (self._sources[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._sources), self.system
        )

    def refuse(self, key: str, value: Any, instead: str) -> NoReturn:
        raise ConfigError(f"{self.where(key)}: {key}={repr(value)[:80]}: {instead}")

    def under(self, prefix: str) -> list[str]:
        return [key for key in self.left if key.startswith(prefix)]


def apply(table: Table, theirs: ForeignKeys, ours: Translation) -> None:
    """Take every key with a rule in ``table``, and their default of those that are left out. Raises
    ConfigError for a value that this project cannot follow.
    """
    rules = {pattern: rule for pattern, rule in table.items() if not isinstance(rule, ByHand)}
    own: dict[str, list[str]] = defaultdict(list)
    for name in rules:
        if not name.endswith("*"):
            own[name.rpartition(".")[0]].append(name)
    for pattern, rule in rules.items():
        is_default = pattern in theirs.defaults and theirs.is_left_out(pattern)
        if is_default and isinstance(rule, MapTo) and ours.get(rule.key) is None:
            ours.set(rule.key, rule.change(theirs.defaults[pattern]))
        keys = [pattern] if pattern in theirs.left else []
        if pattern.endswith("*"):  # for what is not a misspelling of a key with a rule of its own
            keys = [
                key
                for key in theirs.under(pattern[:-1])
                if not difflib.get_close_matches(key, own[key.rpartition(".")[0]], n=1, cutoff=0.9)
            ]
        for key in keys:
            value = theirs.take(key)
            if not theirs.is_left_out(key):  # a key without a value is one that is absent
                _obey(rule, key, value, theirs, ours)


def _obey(rule: Rule, key: str, value: Any, theirs: ForeignKeys, ours: Translation) -> None:
    match rule:
        case MapTo(name, change):
            try:
                changed = change(value)
            except (ValueError, TypeError) as error:
                theirs.refuse(key, value, str(error) if isinstance(error, ValueError) else f"found {kind_of(value)}")
            ours.set(name, changed, theirs.where(key), key)
        case Ignored(why):
            ours.note(key, why)
        case Fixed(values, instead):
            if not any(value == known and type(value) is type(known) for known in values):
                theirs.refuse(key, value, instead)


def require_all_taken(theirs: ForeignKeys, table: Table) -> None:
    """Require a rule for every key. Raises ConfigError that names the nearest key with one."""
    lines = []
    for key in [*theirs.left][:10]:
        if any(name.startswith(f"{key}.") for name in table):
            found = kind_of(theirs.peek(key))
            lines.append(f"{theirs.where(key)}: {key}: expected keys and values, found {found}")
            continue
        near = difflib.get_close_matches(
            key, [name for name in table if not (name.endswith("*") or key.startswith(f"{name}."))], n=1, cutoff=0.75
        )
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"it is not known of {theirs.system}; take it out, or say the same in our words"
        )
        lines.append(f"{theirs.where(key)}: {key}: unknown key; {hint}")
    if lines:
        raise ConfigError("\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Configurations of another system: its YAML or JSON files, or its programs' command lines."""

    system: str
    """Name of the system, for messages."""
    table: Table
    defaults: Defaults
    defaults_of: Callable[[Mapping[str, Any]], Defaults] | None = None
    """Returns the defaults that count for these keys, where they are not ``defaults``."""
    begin: Mapping[str, Any] = field(default_factory=dict)
    """Values of our keys in every run of the system."""
    parts: tuple[Callable[[ForeignKeys, Translation], None], ...] = ()
    """Functions that translate what the table leaves to them, in this order. They raise ConfigError
    for what this project cannot follow.
    """
    settle: Callable[[Translation], None] = lambda ours: None
    """Removes keys without effect, once overrides have chosen backend, device and engine."""
    base: str = ""
    """Key with which a file names the one that it builds on."""
    marks: frozenset[str] = frozenset()
    """Keys at the top of a file by which it is recognized. No other system has them."""
    programs: tuple[str, ...] = ()
    """Programs that take its flags."""

    def translate(self, tree: Mapping[str, Any], sources: Sources) -> Translation:
        """Return our configuration of its keys, from their values and places. Raises ConfigError
        for what this project cannot follow.
        """
        defaults = self.defaults if self.defaults_of is None else self.defaults_of(tree)
        flags = defaults if self.programs else ()
        places: Sources = {(name,): f"default: --{name}" for name in flags}
        theirs, ours = ForeignKeys(self.system, tree, places | sources, defaults), Translation()
        for key, value in self.begin.items():
            ours.set(key, value)
        for part in self.parts:
            part(theirs, ours)
        apply(self.table, theirs, ours)
        require_all_taken(theirs, self.table)
        return ours

"""Configurations of other systems, recognized by their content and translated into ours."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config.aliases import Sources
from common.config.hints import schema_keys
from common.config.load import (
    Fill,
    apply_overrides,
    build_config,
    dump_config,
    read_own_config,
    read_yaml,
)
from common.config.schema import RunConfig
from common.dialects.mindformers import PARTS
from common.dialects.rules import Table, has_rule
from common.errors import ConfigError
from common.systems import gpt2_chinese
from common.systems.dialect import Dialect, Translation, read_foreign, read_word
from common.systems.flags import COMMAND_LINE, check_values, read_command, read_flags
from common.systems.fleetx import config as fleetx
from common.systems.megatron import flags as megatron
from common.systems.mindformers import config as mindformers
from common.systems.oneflow import flags as oneflow
from common.whole_numbers import whole_number
from common.yaml_files import dump_yaml


@dataclass(frozen=True)
class Opened:
    """Configuration, and how it was translated if it came from another system.

    system: the system whose keys the file has, None for ours. origin: the file, or "command line".
    parts_of: the system whose sections a file of ours has.
    """

    config: RunConfig
    ours: Translation
    system: str | None = None
    origin: str = ""
    parts_of: str = ""

    @property
    def remark(self) -> str | None:
        """Line for the log about keys of another system without effect here; None without any."""
        count = len(self.ours.without_effect)
        without = f"{count} of its keys have no effect here, and " if count else ""
        if self.system is None:
            return f"{self.origin}: {without}--show_config lists them" if count else None
        return (
            f"{self.origin}: read as {self.system}'s; {without}--show_config shows"
            f" {'them and ' if count else ''}the YAML that it became"
        )

    @property
    def yaml(self) -> str:
        """YAML that the configuration was translated into. It is empty for a file of ours."""
        if self.system is not None:
            return _annotated(self.system, self.origin, self.ours)
        remarks = "\n".join(_remarks(self.parts_of, self.ours))
        return f"{dump_config(self.config)}{remarks}\n" if remarks else ""


def _annotated(system: str, origin: str, ours: Translation) -> str:
    """Return the YAML of a translated configuration. Behind each key stands the original one, and
    at the end what has no effect here, by reason.
    """
    lines = [
        f"# {origin}: written for {system}, in the words of this project.",
        *_lines(system, ours, ours.tree, ()),
        *_remarks(system, ours),
    ]
    return "\n".join(lines) + "\n"


def _remarks(system: str, ours: Translation) -> list[str]:
    """Return comments with the keys that have no effect, by reason."""
    lines: list[str] = []
    reasons: dict[str, list[str]] = {}
    for key, why in ours.without_effect.items():
        reasons.setdefault(why, []).append(key)
    if reasons:
        lines += ["", f"# Keys of {system} that have no effect here:"]
    for why, keys in reasons.items():
        text = f"{', '.join(keys)}: {why}"
        lines += textwrap.wrap(
            text, 100, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False, break_long_words=False
        )
    return lines


def _lines(system: str, ours: Translation, tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if value:
                yield f"{indent}{key}:"
                yield from _lines(system, ours, value, (*path, key))
            continue
        where = ours.sources.get((*path, key))
        theirs = where if where == "command line" else ours.origins.get(".".join((*path, key)))
        text = dump_yaml({key: value}).rstrip("\n").splitlines()
        text[0] += f"  # {theirs or f'not given: as in {system}'}"
        yield from (indent + line for line in text)


DIALECTS = [mindformers.DIALECT, fleetx.DIALECT, gpt2_chinese.FILES]
"""Systems with YAML or JSON files."""

COMMAND_LINES = {
    "megatron": megatron.DIALECT,
    "oneflow": oneflow.DIALECT,
    "gpt2_chinese": gpt2_chinese.TRAINING,
    "gpt2_chinese_generate": gpt2_chinese.GENERATION,
    "gpt2_chinese_eval": gpt2_chinese.EVALUATION,
}
"""Systems with command lines, by the word of --from."""

OTHER_PROGRAMS = {name: why for dialect in COMMAND_LINES.values() for name, why in dialect.other_programs.items()}
"""Programs of these systems that take other flags, and what to do instead."""

FLAG_FILES = (".sh", ".txt", ".flags", ".args")
"""Endings of files that hold command-line flags; any other file is YAML."""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A configuration of ours or of another system, read once. ``open`` applies overrides to it.

    dialect: the system whose words it has, None for ours; flags: of a file of flags. fill: see
    ``common.config.load.Fill``.
    """

    path: Path
    fill: Fill | None
    where: str = ""
    program: str = ""
    flags: Sequence[str] | None = None
    dialect: Dialect | None = None
    tree: Mapping[str, Any] = field(default_factory=dict)
    sources: Sources = field(default_factory=dict)
    has_parts: bool = False
    """Whether a file of ours has sections of MindFormers'."""

    @classmethod
    def read(cls, path: Path, fill: Fill | None = None) -> ConfigFile:
        """Read a file and those that it extends. Raises ConfigError."""
        if path.suffix in FLAG_FILES:
            where, program, flags = read_command(path, OTHER_PROGRAMS)
            return cls(path=path, fill=fill, where=where, program=program, flags=flags)
        fleetx.require_checkout(path)
        own, places = read_yaml(path)
        dialect = find_dialect(path, own, places)
        if dialect is None:
            tree, sources = read_own_config(path)
        else:
            tree, sources = read_foreign(path, dialect.base, _sections(dialect))
        return cls(
            path=path,
            fill=fill,
            where=str(path),
            dialect=dialect,
            tree=tree,
            sources=sources,
            has_parts=_has_parts(own),
        )

    def open(self, overrides: Sequence[str] = ()) -> Opened:
        """Return the configuration with words ``section.key=value``, whose keys are ours or of the
        file's system. Raises ConfigError.
        """
        if self.flags is not None:
            system = find_command_line(self.flags, self.program)
            return open_flags(system, self.flags, overrides, self.where, self.fill)
        tree, sources = copy.deepcopy(dict(self.tree)), dict(self.sources)
        if self.dialect is None:
            return self._open_own(tree, sources, overrides)
        own = []
        for word in overrides:
            if _is_theirs(self.dialect, word):
                _override(tree, sources, word, self.dialect.table)
            else:
                own.append(word)
        return _finish(self.dialect, self.where, tree, sources, own, self.fill)

    def _open_own(self, tree: dict[str, Any], sources: Sources, overrides: Sequence[str]) -> Opened:
        """Remove keys of MindFormers' sections that have no effect in this run."""
        apply_overrides(tree, sources, overrides)
        ours = Translation(tree, sources)
        if self.has_parts:
            ours.origins = {".".join(map(str, key)): ".".join(map(str, key)) for key in sources}
            mindformers.settle(ours, whole=False)
        config = build_config(ours.tree, ours.sources, self.fill)
        return Opened(config, ours, origin=self.where, parts_of=mindformers.DIALECT.system)


def open_config(path: str | Path, overrides: Sequence[str] = ()) -> Opened:
    """Read a configuration, whose model has sizes, and apply overrides. Raises ConfigError."""
    return ConfigFile.read(Path(path)).open(overrides)


def _has_parts(tree: Mapping[str, Any]) -> bool:
    """Tell whether a file of ours has sections of MindFormers'."""
    context = tree.get("context")
    return not PARTS.isdisjoint(tree) or (isinstance(context, Mapping) and "device_target" in context)


def _is_theirs(dialect: Dialect, word: str) -> bool:
    """Tell whether an override has a key of a dialect. A key of both systems means the same in each."""
    dotted = word.partition("=")[0]
    section = dotted.partition(".")[0]
    return dotted not in schema_keys() and section in _sections(dialect)


def _sections(dialect: Dialect) -> set[str]:
    """Return the keys at the top of a dialect's files."""
    return {*dialect.marks, *(key.partition(".")[0] for key in dialect.table)}


def find_command_line(flags: Sequence[str], program: str = "") -> str:
    """Return the key in COMMAND_LINES of the system that has this program, or else most of these flags."""
    for system, dialect in COMMAND_LINES.items():
        if program in dialect.programs:
            return system
    names = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in flags if word.startswith("--")}
    return max(COMMAND_LINES, key=lambda system: sum(has_rule(name, COMMAND_LINES[system].table) for name in names))


def open_flags(
    system: str,
    words: Sequence[str],
    overrides: Sequence[str] = (),
    where: str = COMMAND_LINE,
    fill: Fill | None = None,
) -> Opened:
    """Read the command line of another system: ``system`` is a key of COMMAND_LINES. Raises ConfigError."""
    dialect = COMMAND_LINES[system]
    tree, sources, replaced = read_flags(words, where, dialect.table)
    own = [key for key in tree if has_rule(key, dialect.table)]
    for other in COMMAND_LINES.values():
        alien = [key for key in tree if key not in own and has_rule(key, other.table)]
        if alien:
            raise ConfigError(
                f"{sources[alien[0],]} is {other.system}'s, and"
                f" {'other flags are' if own else 'the flags here are'} {dialect.system}'s; keep one system's flags"
            )
    check_values(tree, sources, dialect.table)
    opened = _finish(dialect, where, tree, sources, overrides, fill)
    opened.ours.without_effect.update(replaced)
    return opened


def _finish(
    dialect: Dialect, origin: str, tree: dict[str, Any], sources: Sources, overrides: Sequence[str], fill: Fill | None
) -> Opened:
    ours = dialect.translate(tree, sources)
    ours.join_dropout()
    apply_overrides(ours.tree, ours.sources, overrides)
    dialect.settle(ours)
    ours.drop_own_defaults()
    return Opened(build_config(ours.tree, ours.sources, fill), ours, dialect.system, origin)


def find_dialect(path: Path, tree: Mapping[str, Any], sources: Sources) -> Dialect | None:
    """Return the system whose keys a YAML has, None for ours. Raises ConfigError for keys of several systems."""
    found = [(dialect, sorted(_marks(tree, dialect))) for dialect in DIALECTS]
    found = [(dialect, marks) for dialect, marks in found if marks]
    if not found:
        return None
    if len(found) > 1:
        places = "; ".join(
            f"{sources.get((marks[0],), path)}: {marks[0]} is {dialect.system}'s" for dialect, marks in found
        )
        raise ConfigError(f"{path}: mixes the words of several systems: {places}; keep one")
    dialect, marks = found[0]
    own = {"base", "train", "precision", "logging"} & tree.keys()
    if own:
        raise ConfigError(
            f"{sources.get((min(own),), path)}: {min(own)} is ours, and {marks[0]} ({sources.get((marks[0],), path)})"
            f" is {dialect.system}'s; keep one system's words in a file, and give the rest on the command line"
        )
    return dialect


def _marks(tree: Mapping[str, Any], dialect: Dialect) -> set[str]:
    marks = set(dialect.marks & tree.keys())
    if dialect is mindformers.DIALECT and isinstance(model := tree.get("model"), Mapping) and "model_config" in model:
        marks.add("model")
    return marks


def _override(tree: dict[str, Any], sources: Sources, word: str, table: Table) -> None:
    """Apply ``-o Section.key=value``. A number in the path is an index of a list."""
    dotted, equals, text = word.partition("=")
    if not equals or not all(dotted.split(".")):
        raise ConfigError(f"command line: {word!r}: expected section.key=value")
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    value = read_word(text, table.get(dotted), f"command line: {dotted}")
    keys: list[Any] = dotted.split(".")
    at: Any = tree
    for depth, key in enumerate(keys, 1):
        if isinstance(at, list):
            key = whole_number(key)
            if key is None or key >= len(at):
                raise ConfigError(f"command line: {word}: the list has places 0 to {len(at) - 1}")
        elif not isinstance(at, dict):
            raise ConfigError(
                f"command line: {word}: {'.'.join(keys[: depth - 1])} is not a section of the file; check the path"
            )
        if depth == len(keys):
            at[key] = value
        elif isinstance(at, dict) and at.get(key) is None:
            at[key] = {}
        at = at[key]
    sources[tuple(dotted.split("."))] = f"command line: {dotted}"

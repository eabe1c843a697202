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
    read_yaml_text,
)
from common.config.schema import RunConfig
from common.dialects.mindformers import PARTS
from common.dialects.rules import Table, has_rule
from common.errors import ConfigError
from common.systems import gpt2_chinese
from common.systems.dialect import Dialect, Translation, read_foreign, read_word
from common.systems.flags import COMMAND_LINE, check_value, read_command, read_flags
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
    """

    config: RunConfig
    ours: Translation
    system: str | None = None
    origin: str = ""

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
        """YAML that the configuration was translated into. Behind each key stands the original one, and
        at the end what has no effect here, by reason. A file of ours has YAML where keys have no effect.
        """
        reasons: dict[str, list[str]] = {}
        for key, why in self.ours.without_effect.items():
            reasons.setdefault(why, []).append(key)
        system = self.system or mindformers.DIALECT.system
        remarks = ["", f"# Keys of {system} that have no effect here:"] if reasons else []
        for why, keys in reasons.items():
            remarks += textwrap.wrap(
                f"{', '.join(keys)}: {why}", 100, initial_indent="#   ", subsequent_indent="#     ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
        if self.system is None:
            return "\n".join([dump_config(self.config).rstrip("\n"), *remarks, ""]) if remarks else ""
        head = f"# {self.origin}: written for {system}, in the words of this project."
        return "\n".join([head, *_lines(system, self.ours, self.ours.tree, ()), *remarks, ""])


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


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A configuration of ours or of another system, read once. ``open`` applies overrides to it.

    where: the file, or "command line". dialect: the system whose words it has, None for ours. fill: see
    ``common.config.load.Fill``.
    """

    path: Path
    fill: Fill | None
    where: str
    dialect: Dialect | None
    tree: Mapping[str, Any]
    sources: Sources
    has_parts: bool = False
    """Whether a file of ours has sections of MindFormers'."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Flags that a later one replaces, with a remark on each."""

    @classmethod
    def read(cls, path: Path, fill: Fill | None = None) -> ConfigFile:
        """Read a file and those that it extends. Raises ConfigError."""
        is_script = path.suffix.lower() in (".sh", ".txt", ".flags", ".args")
        if not is_script:
            fleetx.require_checkout(path)
            text = read_yaml_text(path)
            if path.suffix == ".py":
                raise ConfigError(
                    f"{path}: no program is run for its values; write a YAML (--explain NAME finds our key)"
                )
        if is_script or text.startswith("#!"):  # any other file is YAML
            where, program, flags = read_command(path)
            return cls.of_flags(find_command_line(flags, program), flags, where, path, fill)
        own, places = read_yaml(path, text=text)
        dialect = find_dialect(path, own, places)
        if dialect is None:
            tree, sources = read_own_config(path, text)
        else:
            tree, sources = read_foreign(path, dialect.base, _sections(dialect), text)
        context = own.get("context")
        parts = not PARTS.isdisjoint(own) or (isinstance(context, Mapping) and "device_target" in context)
        where = str(path)
        return cls(path=path, fill=fill, where=where, dialect=dialect, tree=tree, sources=sources, has_parts=parts)

    @classmethod
    def of_flags(
        cls, system: str, words: Sequence[str], where: str, path: Path = Path(), fill: Fill | None = None
    ) -> ConfigFile:
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
        for key, value in tree.items():
            check_value(value, dialect.table.get(key), sources[key,])
        return cls(path=path, fill=fill, where=where, dialect=dialect, tree=tree, sources=sources, replaced=replaced)

    def open(self, overrides: Sequence[str] = ()) -> Opened:
        """Return the configuration with words ``section.key=value``, whose keys are ours or of the
        file's system. Raises ConfigError.
        """
        tree, sources, dialect = copy.deepcopy(dict(self.tree)), dict(self.sources), self.dialect
        if dialect is None:
            apply_overrides(tree, sources, overrides)
            ours = Translation(tree, sources)
            if self.has_parts:  # some of their keys have no effect in this run
                ours.origins = {".".join(map(str, key)): ".".join(map(str, key)) for key in sources}
                mindformers.settle(ours, whole=False)
            return Opened(build_config(ours.tree, ours.sources, self.fill), ours, origin=self.where)
        own = []
        for word in overrides:
            dotted = word.partition("=")[0]
            # a key of both systems means the same in each
            top = dotted if dialect.programs else dotted.partition(".")[0]
            if dotted in schema_keys() or top not in _sections(dialect):
                own.append(word)
            else:
                _override(tree, sources, word, dialect.table)
        ours = dialect.translate(tree, sources)
        rate = "model.attention_dropout"
        if ours.get(rate) == ours.get("model.dropout") and not ours.origins.get(rate):
            ours.drop(rate, "")  # their default: model.dropout=0 of a command line is for all parts
        apply_overrides(ours.tree, ours.sources, own)
        dialect.settle(ours)
        if ours.get("parallel.sequence_parallel") and ours.get("parallel.model_parallel", 1) == 1:
            ours.drop("parallel.sequence_parallel", "one tensor-parallel rank has nothing to split")
        for key, known in schema_keys().items():  # what no key of theirs set, and ours are anyway
            if ours.origins.get(key) == "" and ours.get(key) == known.default:
                ours.drop(key, "")
        config = build_config(ours.tree, ours.sources, self.fill)
        ours.without_effect |= self.replaced
        return Opened(config, ours, dialect.system, self.where)


def open_config(path: str | Path, overrides: Sequence[str] = ()) -> Opened:
    """Read a configuration, whose model has sizes, and apply overrides. Raises ConfigError."""
    return ConfigFile.read(Path(path)).open(overrides)


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


def open_flags(system: str, words: Sequence[str], overrides: Sequence[str] = (), where: str = COMMAND_LINE) -> Opened:
    """Read the command line of another system as ``ConfigFile.of_flags``, and apply overrides."""
    return ConfigFile.of_flags(system, words, where).open(overrides)


def find_dialect(path: Path, tree: Mapping[str, Any], sources: Sources) -> Dialect | None:
    """Return the system whose keys a YAML has, None for ours. Raises ConfigError for keys of several systems."""
    model = tree.get("model")  # ours too
    names = {*tree} if isinstance(model, Mapping) and "model_config" in model else {*tree} - {"model"}
    found = [(each, min(marks)) for each in DIALECTS if (marks := each.marks & names)]
    if not found:
        return None
    if len(found) > 1:
        places = "; ".join(f"{sources.get((mark,), path)}: {mark} is {dialect.system}'s" for dialect, mark in found)
        raise ConfigError(f"{path}: mixes the words of several systems: {places}; keep one")
    [(dialect, mark)] = found
    own = {"base", "train", "precision", "logging"} & tree.keys()
    if own:
        raise ConfigError(
            f"{sources.get((min(own),), path)}: {min(own)} is ours, and {mark} ({sources.get((mark,), path)})"
            f" is {dialect.system}'s; keep one system's words in a file, and give the rest on the command line"
        )
    return dialect


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

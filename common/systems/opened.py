"""Configuration read from another system's file, and the YAML that it was translated into."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common.config.load import dump_config
from common.config.schema import RunConfig
from common.systems.dialect import Translation
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
            text,
            100,
            initial_indent="#   ",
            subsequent_indent="#     ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def _lines(
    system: str, ours: Translation, tree: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[str]:
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

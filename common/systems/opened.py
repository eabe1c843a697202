"""A configuration that was read in another system's words, and the YAML of ours that it became."""

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
    """A configuration; of one in another system's words also how it was translated.

    system: whose words the file has; None: ours. origin: the file, or "command line". parts_of:
    whose sections a file of ours has.
    """

    config: RunConfig
    ours: Translation
    system: str | None = None
    origin: str = ""
    parts_of: str = ""

    @property
    def without_effect(self) -> int:
        """Number of keys of another system that have no effect here."""
        return len(self.ours.without_effect)

    @property
    def yaml(self) -> str:
        """The YAML that the configuration became; empty for a file of ours that is it already."""
        if self.system is not None:
            return _annotated(self.system, self.origin, self.ours)
        remarks = "\n".join(_remarks(self.parts_of, self.ours))
        return f"{dump_config(self.config)}{remarks}\n" if remarks else ""


def _annotated(system: str, origin: str, ours: Translation) -> str:
    """The YAML that a configuration became: behind each key the one it was, at the end what has no
    effect here, by reason.
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

"""YAML files that extend other files, as those of MindFormers and FleetX do."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from common.config.load import read_yaml
from common.errors import ConfigError
from common.structured_files import MAX_DEPTH

Sources: TypeAlias = dict[tuple[str | int, ...], str]
"""Place of each key: the file and the line."""
_LIKE = 0.75
"""Least likeness (difflib's ratio) of a key at the top to a misspelled section."""


def read_with_bases(
    path: Path,
    base: str,
    sections: Collection[str] = (),
    parents: tuple[str, ...] = (),
    text: str | None = None,
) -> tuple[dict[str, Any], Sources]:
    """Return a file merged over the files that its key ``base`` names. Its own values win, section
    by section. Raises ConfigError.

    sections: keys at the top that the system has. Another one is left out if aliases use its
    anchors. text: content of the file, if it has been read.
    """
    chain = (*parents, os.path.realpath(path))
    carriers: set[str] = set()
    own, sources = read_yaml(path, carriers, text=text)
    for name in carriers if sections else ():
        if not difflib.get_close_matches(name, sections, n=1, cutoff=_LIKE):
            del own[name]
    names = own.pop(base, None) or []
    names = [names] if isinstance(names, str) else names
    where = sources.pop((base,), str(path))
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or len(names) > MAX_DEPTH
    ):
        raise ConfigError(
            f"{where}: {base}: expected the name of a file or a list of at most {MAX_DEPTH}"
        )
    tree: dict[str, Any] = {}
    merged: Sources = {}
    for name in names:
        if not (path.parent / name).is_file():
            raise ConfigError(
                f"{where}: {base}: {path.parent / name}: no such file; copy it beside, or"
                " take it out of the list"
            )
        if os.path.realpath(path.parent / name) in chain or len(chain) >= MAX_DEPTH:
            raise ConfigError(
                f"{where}: {base}: {path.parent / name}: files include each other:"
                f" {' -> '.join(chain)}; take one of them out"
            )
        base_tree, base_sources = read_with_bases(path.parent / name, base, sections, chain)
        merge(tree, base_tree)
        merged |= base_sources
    merge(tree, own)
    return tree, merged | sources


def merge(target: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Merge sections; FleetX's ``_inherited_: False`` in a section replaces the base's section."""
    for key, value in other.items():
        old = target.get(key)
        if isinstance(value, Mapping) and value.get("_inherited_") is False:
            target[key] = {name: item for name, item in value.items() if name != "_inherited_"}
        elif isinstance(old, dict) and isinstance(value, Mapping):
            merge(old, value)
        elif isinstance(value, Mapping):
            target[key] = {}
            merge(target[key], value)
        else:
            target[key] = value

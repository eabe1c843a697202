"""Runs of other systems in a few keys, and the rows of each system's file in ``rows``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from common.config.load import apply_overrides, build_config, flatten
from common.config.schema import RunConfig
from common.dialects.rules import MapTo
from common.systems.dialect import Dialect


@dataclass(frozen=True)
class Sentinel:
    """A value of theirs that is not a plain quantity.

    meaning: what it does there, with the source. expected: values of our keys, or a part of the
    message of a refusal. beside: further keys of theirs.
    """

    key: str
    value: Any
    meaning: str
    expected: Mapping[str, Any] | str
    beside: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """What a system's file or command line is tested with.

    minimal: the keys of its smallest run. beside: the keys with which a key acts. without_default:
    a reason for each key without a default in ``dialect.defaults``. sentinels: values that are no
    plain quantities.
    """

    dialect: Dialect
    minimal: Mapping[str, Any]
    without_default: Mapping[str, str]
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sentinels: Sequence[Sentinel] = ()


def all_rows() -> dict[str, Rows]:
    """Return the rows of each system and program."""
    found: dict[str, Rows] = {}
    for file in sorted(Path(__file__).parent.glob("rows/[a-z]*.py")):
        found |= import_module(f"tests.common.systems.rows.{file.stem}").ROWS
    return found


def config_of(dialect: Dialect, leaves: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a file with these dotted keys, or of these flags. Raises
    ConfigError.
    """
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    ours = dialect.translate(tree, {})
    apply_overrides(ours.tree, ours.sources, [])
    dialect.settle(ours)
    return build_config(ours.tree, ours.sources)


def values_of(config: RunConfig) -> dict[str, Any]:
    """Return the values of a configuration by dotted key."""
    return dict(flatten(config.model_dump()))


def mapped_keys(dialect: Dialect) -> dict[str, str]:
    """Return the keys that become one of ours by the table, with the key of ours."""
    return {
        key: rule.key
        for key, rule in dialect.table.items()
        if isinstance(rule, MapTo) and not key.endswith("*")
    }

"""Members that a module with another system's configurations has, for ``common.systems.config``."""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from typing import Any, Protocol

from common.dialects.rules import Defaults, Table
from common.systems.dialect import Translation


class DialectModule(Protocol):
    @property
    def SYSTEM(self) -> str:
        """Name of the system, for messages."""

    @property
    def TABLE(self) -> Table:
        """Rules for its keys."""

    @property
    def DEFAULTS(self) -> Defaults:
        """Values of keys that a file or a command leaves out."""

    def translate(
        self, tree: Mapping[str, Any], sources: Mapping[tuple[str | int, ...], str], /
    ) -> Translation:
        """Return our configuration of its keys and values. Raises ConfigError for what this project
        cannot follow.
        """

    def settle(self, ours: Translation, /) -> None:
        """Remove keys without effect, once overrides have chosen backend, device and engine."""


class FileDialect(DialectModule, Protocol):
    """A system with YAML or JSON files."""

    @property
    def BASE(self) -> str:
        """Key with which a file names the one that it builds on."""

    @property
    def MARKS(self) -> AbstractSet[str]:
        """Keys at the top of a file by which it is recognized. No other system has them."""


class CommandLine(DialectModule, Protocol):
    """A system with command lines. It may also have PROGRAMS, where several programs take the same
    flags.
    """

    @property
    def PROGRAM(self) -> str:
        """Program that takes the flags."""

"""Checks for optional packages before they are imported."""

from __future__ import annotations

import importlib.util

from common.errors import ConfigError


def install(extra: str) -> str:
    """Return the command, in the folder of the project, that installs one of its extras."""
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def require_package(name: str, *, extra: str, purpose: str) -> None:
    """Raise ConfigError unless the package is installed.

    extra: the extra of this project that installs it. purpose: a clause such as "which writes
    ONNX".
    """
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"the package {name}, {purpose}, is not installed; {install(extra)}")

"""Folder of the project, its optional packages, and text about missing paths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UserError

ROOT = Path(__file__).resolve().parents[1]
"""Folder of the project."""
_OF_WHEEL = ROOT / "gpt2_toolkit" / "tools"
TOOLS = _OF_WHEEL if _OF_WHEEL.is_dir() else ROOT / "tools"
"""Folder of the programs, which a wheel puts into a package of its own."""


def looked_in(path: str | Path) -> str:
    """Return `` (looked in FOLDER)`` for a relative path, and nothing for an absolute one.

    FOLDER is the working directory.
    """
    return "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"


def install(extra: str) -> str:
    """Return the command, in the folder of the project, that installs one of its extras."""
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def require_package(
    name: str, *, extra: str, purpose: str, error: type[UserError] = ConfigError, load: bool = True
) -> Any:
    """Return a package. Raises ``error`` if it is not installed, or cannot be imported: another system's build.

    extra: the extra of this project that installs it. purpose: a clause such as "which writes ONNX". load: False only
    looks whether it is installed, before a run that may not use it.
    """
    if importlib.util.find_spec(name) is None:
        raise error(f"the package {name}, {purpose}, is not installed; {install(extra)}")
    try:
        return importlib.import_module(name) if load else None
    except (ImportError, OSError) as reason:  # OSError: a library that ctypes loads
        raise error(f"the package {name}, {purpose}, cannot be imported ({reason}); {install(extra)}") from reason

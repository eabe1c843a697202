"""Folder of the project, and text about missing paths."""

from __future__ import annotations

from pathlib import Path

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

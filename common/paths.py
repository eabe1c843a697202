"""The project's folder, and words about paths that are not there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The project's folder."""


def looked_in(path: str | Path) -> str:
    """`` (looked in FOLDER)`` behind a relative path, which is relative to the working directory;
    nothing behind an absolute one.
    """
    return "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"

"""Existing checkpoint folders, found by step, by ``latest`` or in a run folder.

A folder that cannot be read is an error, never an empty folder: a run must not start over because a
disk answers late. ``common.checkpoint.writer`` describes how the folders are written.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from common.checkpoint.manifest import MANIFEST, check_files, read_manifest
from common.errors import CheckpointError
from common.files import atomic_write
from common.log import LOG

Kept = TypeVar("Kept")
LATEST = "latest"
_STEP_FOLDER = re.compile(r"step_(\d{8,18})")


def step_of(name: str) -> int:
    """Return the step of a checkpoint folder's name; -1 for other names."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else -1


def point_latest(checkpoint: Path) -> None:
    """Make ``latest`` name this checkpoint."""
    with atomic_write(checkpoint.parent / LATEST, "w") as file:
        file.write(checkpoint.name + "\n")


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoint folders inside ``folder``, by step.

    Raises CheckpointError if it cannot be read.
    """
    return [path for path in _step_folders(folder) if _is_file(path / MANIFEST)]


def surplus(found: Iterable[Kept], written: Kept, keep: int, order: Callable[[Kept], Any]) -> list[Kept]:
    """Return what to remove, so that ``keep`` of them stay (0: all): the one just written, then the
    newest before it, then those of later steps.
    """
    others = sorted((each for each in found if each != written), key=order)
    later = [each for each in others if order(each) > order(written)]
    first = [*later, *others[: len(others) - len(later)]]
    return first[: max(0, len(others) + 1 - keep)] if keep else []


def find_checkpoint(where: Path) -> Path | None:
    """Return the checkpoint in a step folder, a ``checkpoints`` folder, a run folder or a ``latest`` file.

    None if there is none yet. Raises CheckpointError if that cannot be known, and if no checkpoint there is complete.
    """
    where = Path(where)
    if where.name == LATEST and _is_file(where):
        where = where.parent
    if _is_file(where / MANIFEST):
        return where
    inside = where / "checkpoints"
    folder = inside if _mode(inside, stat.S_ISDIR) or os.path.islink(inside) else where
    named, there, whole = _look(folder)
    if named is None:
        if there and not whole:
            raise CheckpointError(f"{there[-1]}: has no {MANIFEST}, so it is not a whole checkpoint; {_remedy(folder)}")
        return whole[-1] if whole else None
    found = next((path for path in whole if path.name == named), None)
    if found is not None:
        return found
    shown = f"{folder / LATEST} names {named!r}, which is not a whole checkpoint here"
    older = [path for path in whole if step_of(path.name) < step_of(named)] if step_of(named) >= 0 else whole
    if older:
        LOG.warning(f"{shown}; taking {older[-1]} instead")
        return older[-1]
    if not whole and not there and step_of(named) < 0 and folder == where:
        return None  # a file of this name by another program
    rest = f"; whole and newer: {', '.join(path.name for path in whole)}" if whole else ""
    raise CheckpointError(f"{shown}{rest}; {_remedy(folder)}")


def _look(folder: Path) -> tuple[str | None, list[Path], list[Path]]:
    """Return what ``latest`` names, all checkpoint folders, and the complete ones.

    They are of one moment, since a run may be writing there.
    """
    while True:
        named = _latest(folder)
        there = _step_folders(folder)
        whole = [path for path in there if _is_file(path / MANIFEST)]
        if any(path.name == named for path in whole) or _latest(folder) == named:
            return named, there, whole


def _remedy(folder: Path) -> str:
    return (
        "bring its files back, name another checkpoint (checkpoint.resume=FOLDER to train, checkpoint.load=FOLDER"
        f" else), choose another output_dir, or remove {folder} to start over"
    )


class NoCheckpointError(CheckpointError):
    """No complete checkpoint at ``where``. why: the key that asked for one, or its purpose."""

    where: Path
    why: str


def require_checkpoint(where: Path, why: str) -> Path:
    """Return the result of find_checkpoint. Raises NoCheckpointError instead of None."""
    found = find_checkpoint(where)
    if found is None:
        error = NoCheckpointError(
            f"{where}: no whole checkpoint here ({why}); expected a run folder, its checkpoints"
            " folder or a step_... folder"
        )
        error.where, error.why = Path(where), why
        raise error
    return found


def read_or_name_older(checkpoint: Path, key: str, manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a manifest, unless it has been read, and compare checksums.

    For a damaged checkpoint, the CheckpointError names a complete older one beside it. key: the
    override that selects it, checkpoint.resume or checkpoint.load.
    """
    try:
        manifest = manifest or read_manifest(checkpoint, checksums=False)
        check_files(checkpoint, manifest)
        return manifest
    except CheckpointError as error:
        others: list[Path] = []
        with suppress(CheckpointError):
            others = whole_checkpoints(checkpoint.parent)
        for other in reversed(others):
            if step_of(other.name) >= step_of(checkpoint.name):
                continue
            try:
                read_manifest(other)
            except CheckpointError:
                continue
            raise CheckpointError(f"{error}: {other.name} beside it is whole, {key}={other} uses it") from None
        raise


# ---- reading, where only absence means that a file does not exist ----


def _step_folders(folder: Path) -> list[Path]:
    """Return the folders named step_NUMBER, by step, complete or not."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        if os.path.islink(folder):
            raise CheckpointError(
                f"{folder}: is a link to {os.readlink(folder)}, which is not there; is its disk mounted?"
            ) from None
        return []
    except NotADirectoryError:
        return []
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from None
    found = sorted((name for name in names if step_of(name) >= 0), key=lambda name: (step_of(name), name))
    return [folder / name for name in found if _mode(folder / name, stat.S_ISDIR)]


def _latest(folder: Path) -> str | None:
    path = folder / LATEST
    try:
        with path.open("rb") as file:
            return file.read(1000).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from None


def _is_file(path: Path) -> bool:
    return _mode(path, stat.S_ISREG)


def _mode(path: Path, is_kind: Any) -> bool:
    try:
        return bool(is_kind(path.stat().st_mode))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(
        f"{path}: cannot be read: {reason}; so it is unknown which checkpoints are there, and"
        " nothing was started: make it readable for this user, or try again when its disk answers"
    )

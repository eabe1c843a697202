"""Files and folders that are whole or absent: write under a temporary name, fsync, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from common.errors import StorageError


@contextmanager
def atomic_write(path: Path, mode: str = "wb") -> Iterator[IO]:  # type: ignore[type-arg]
    """Open ``path`` for writing so that readers see the old file or the whole new one, never a part.

    mode: "wb", or "w" for UTF-8 text with unix line ends.
    Raises StorageError when the disk refuses; the old file is then untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open(mode, **text) as file:  # type: ignore[call-overload]
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: could not be written: {error.strerror or error}; an older file of this name is untouched") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


_REPLACED = ".replaced.tmp"


def put_in_place(folder: Path, target: Path) -> None:
    """Give ``folder``, whose files are durable, the name ``target``; what has it until now goes last. Raises OSError, nothing lost."""
    replaced = target.with_name(f".{target.name}{_REPLACED}")
    if target.exists():
        os.replace(target, replaced)
    try:
        os.replace(folder, target)
    except BaseException:  # a signal too
        if replaced.exists():
            os.replace(replaced, target)
        raise
    fsync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clean_up(parent: Path, names: str) -> None:
    """Finish what a killed writer left of files and folders of these names (a glob): a folder whose replacement never came is put back,
    .NAME*.tmp go."""
    for replaced in parent.glob(f".{names}{_REPLACED}"):
        target = parent / replaced.name[1:].removesuffix(_REPLACED)
        if not target.exists():
            os.replace(replaced, target)
    for leftover in (*parent.glob(f".{names}.tmp"), *parent.glob(f".{names}.*.tmp")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path, *, what: str, remedy: str) -> Iterator[Path]:
    """A folder to fill, which gets the name ``folder`` at the end; an older one stays until then. Raises StorageError when the disk
    refuses, with ``remedy``."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        clean_up(folder.parent, folder.name)
        temporary.mkdir(parents=True)
        yield temporary
        fsync_folder(temporary)
        put_in_place(temporary, folder)
    except (OSError, StorageError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise StorageError(f"{folder}: {what} could not be written: {reason}; {remedy}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Make the names inside ``folder`` durable (a rename alone may be lost by a power cut)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

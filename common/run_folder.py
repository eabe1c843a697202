"""Folder of a run: locked against a second run, and identified by the content of its lock file."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError, StorageError, UserError
from common.files import take_lock
from common.log import LOG

LOCK = ".lock"
CHECKPOINTS = "checkpoints"
ATTEMPTS = "attempts.jsonl"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Variable of a rank with the number of its attempt, from 0, as torchrun sets it."""
SLURM_RESTART_COUNT = "SLURM_RESTART_COUNT"
"""Variable with the number of times that Slurm has queued the job again.

A job that was queued once does not have it. Source: sbatch(1).
"""


class LostFolderError(StorageError):
    """Another process removed or replaced the run folder, so nothing more is written or removed there."""


@contextmanager
def owned_folder(folder: Path, *, active: bool = True) -> Iterator[None]:
    """Create the run folder and lock it against a second run, for all ranks.

    The lock ends with the process, however it ends. A refusal (UserError) before anything is written leaves no folder.
    """
    if not active:
        yield
        return
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = set(os.listdir(folder))
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder}: cannot be used: {error.strerror}; choose a folder that can be read and written"
        ) from None
    with lock:
        try:
            if not take_lock(lock):
                raise _taken(folder)
        except OSError as error:
            LOG.warning(f"{folder}: cannot be held against a second run here ({error.strerror})")
        lock.truncate(0)
        lock.write(uuid.uuid4().hex)  # other ranks compare it to see whether their folder is the same one
        lock.flush()
        os.fsync(lock.fileno())
        try:
            yield
        except UserError:
            with suppress(OSError):  # which a folder with a file is
                new = set(os.listdir(folder)) - old
                if CHECKPOINTS in new:
                    (folder / CHECKPOINTS).rmdir()
                if new == new & {LOCK, CHECKPOINTS} and LOCK in new:
                    (folder / LOCK).unlink()
                for path in absent:
                    path.rmdir()
            raise


def holder(folder: Path) -> str:
    """Return the text that the run holding the folder wrote into its lock.

    It is empty if another host has another folder of the same name.
    """
    try:
        return (folder / LOCK).read_text(encoding="utf-8")
    except OSError:
        return ""


def keeper(folder: Path, holders: Sequence[str], rank: int) -> Callable[[], None]:
    """Return a function that raises LostFolderError once this run no longer holds the run folder.

    holders: text that ``holder`` returned on each rank at the start. A rank that does not see rank
    0's folder has nothing to compare. Another folder's lock differs in its text and in its inode.
    An export of this run may change the text, and some file systems change the inode.
    """
    token = holders[rank] if holders[rank] == holders[0] else ""
    inode = (folder / LOCK).stat().st_ino if token else 0

    def require() -> None:
        try:
            is_ours = not token or (folder / LOCK).stat().st_ino == inode
            is_ours = is_ours or (folder / LOCK).read_text(encoding="utf-8", errors="replace") == token
        except (FileNotFoundError, NotADirectoryError):
            is_ours = False
        # a disk that does not answer does not reveal whose folder it is; the next write will fail
        except OSError:
            is_ours = True
        if not is_ours:
            raise LostFolderError(
                f"output_dir={folder}: the folder was removed, or replaced by another run's, while this run was"
                " writing there; it stops, and writes nothing more; give every run an output_dir of its own"
            )

    return require


def append_attempt(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line about an attempt of the run, numbered by the lines before it.

    A disk that fails does not end the run.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ATTEMPTS).open("a+b") as file:
            file.seek(0)
            numbered = {"attempt": file.read().count(b"\n") + 1, **line}
            file.write(json.dumps(numbered, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def require_free_folder(folder: Path) -> None:
    """Raise ConfigError if a run holds ``folder``, without writing anything.

    Rank 0 does the same in ``owned_folder``. A file system without locks prevents nothing here; rank 0 decides there.
    """
    with suppress(OSError), (folder / LOCK).open("rb") as lock:
        # shared: two processes that check do not see each other
        if not take_lock(lock, shared=True):
            raise _taken(folder)


def _taken(folder: Path) -> ConfigError:
    return ConfigError(f"output_dir={folder}: another run is writing here; wait for it or choose another folder")

"""The folder of a run: held against a second run by a lock, and known again by what the lock file
holds.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import ConfigError, StorageError
from common.log import LOG

LOCK = ".lock"


class LostFolderError(StorageError):
    """The run folder was removed, or replaced by another one, under the run: nothing more is
    written or removed there.
    """


@contextmanager
def owned_folder(folder: Path, *, active: bool = True) -> Iterator[None]:
    """Make the run folder and hold it against a second run, for all ranks. The hold ends with the
    process, however it ends.
    """
    if not active:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder}: cannot be used: {error.strerror}; choose a folder that can be"
            " written"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output_dir={folder}: another run is writing here; wait for it or choose another"
                " folder"
            ) from None
        except OSError as error:
            LOG.warning(f"{folder}: cannot be held against a second run here ({error.strerror})")
        lock.truncate(0)
        lock.write(uuid.uuid4().hex)  # by which other ranks see whether theirs is the same folder
        lock.flush()
        os.fsync(lock.fileno())
        yield


def holder(folder: Path) -> str:
    """What the run that holds the folder wrote into it; empty where the folder is another one, of
    the same name on another host.
    """
    try:
        return (folder / LOCK).read_text(encoding="utf-8")
    except OSError:
        return ""


def keeper(folder: Path, holders: Sequence[str], rank: int) -> Callable[[], None]:
    """Return a function that raises LostFolderError once the run folder is no longer the one that
    this run holds.

    holders: what ``holder`` has told each rank at the start. A rank that does not see rank 0's
    folder has nothing to compare. Another folder's lock differs in its text and in its inode: an
    export of this run may change the one, some file systems the other.
    """
    token = holders[rank] if holders[rank] == holders[0] else ""
    inode = (folder / LOCK).stat().st_ino if token else 0

    def require() -> None:
        try:
            is_ours = not token or (folder / LOCK).stat().st_ino == inode
            is_ours = (
                is_ours or (folder / LOCK).read_text(encoding="utf-8", errors="replace") == token
            )
        except (FileNotFoundError, NotADirectoryError):
            is_ours = False
        # a disk that does not answer says nothing about whose folder it is; what is written next
        # will tell
        except OSError:
            is_ours = True
        if not is_ours:
            raise LostFolderError(
                f"output_dir={folder}: the folder was removed, or replaced by another run's, while"
                " this run was writing there; it stops, and writes nothing more; give every run an"
                " output_dir of its own"
            )

    return require


def require_free_folder(folder: Path) -> None:
    """Raise ConfigError where a run holds ``folder``, as ``owned_folder`` does on its rank 0.
    Nothing is written.

    A file system without locks holds nobody back: there rank 0 decides.
    """
    with suppress(OSError), (folder / LOCK).open("rb") as lock:
        try:
            # shared: two that ask do not see each other
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output_dir={folder}: another run is writing here; wait for it or choose another"
                " folder"
            ) from None

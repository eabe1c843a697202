"""Input files; output that is complete or absent; locks that end with the process that holds them."""

from __future__ import annotations

import fcntl
import fnmatch
import glob
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO

from common.errors import ConfigError, StorageError, UserError
from common.file_kinds import HEAD_BYTES, LFS_POINTER, foreign_kind
from common.paths import looked_in


@contextmanager
def reading(path: Path | str, error: type[UserError]) -> Iterator[None]:
    """Turn OSError for an unreadable input file into ``error``, with a remedy."""
    try:
        yield
    except OSError as reason:
        name = reason.filename or path
        where = looked_in(name) if isinstance(reason, FileNotFoundError) else ""
        raise error(f"{name}: {unreadable(reason)}{where}") from None


def unreadable(reason: OSError) -> str:
    """Return the reason why an input file cannot be read, and the remedy."""
    if isinstance(reason, FileNotFoundError):
        return "no such file; check the path"
    remedies: dict[type[OSError], str] = {
        IsADirectoryError: "give the path of a file",
        PermissionError: "allow this user to read it (chmod, chown)",
    }
    return f"cannot be read: {reason.strerror or reason}; {remedies.get(type(reason), 'check the path and the disk')}"


def open_input(path: Path | str, error: type[UserError]) -> BufferedReader:
    """Open a regular file for reading.

    Raises ``error`` with the path, the reason and a remedy, also for a pointer of Git LFS.
    """
    if "\0" in str(path):
        raise error(f"{str(path)!r}: a null byte cannot be part of a path; give the path of a file")
    with reading(path, error):
        mode = os.stat(path).st_mode
        # opening a pipe would wait for a writer
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise error(
                f"{path}: is a device, a pipe or a socket, expected a regular file; write its content to a file first"
            )
        file = Path(path).open("rb")  # noqa: SIM115
        try:
            head = file.peek(HEAD_BYTES)
            if head.startswith(LFS_POINTER):
                raise error(f"{path}: {foreign_kind(head)}")
        except BaseException:
            file.close()
            raise
        return file


@contextmanager
def atomic_write(path: Path, mode: str = "wb") -> Iterator[IO]:  # type: ignore[type-arg]
    """Open ``path`` for writing so that readers see the old file or the complete new one.

    mode: "wb", or "w" for UTF-8 text with unix line ends. Leftovers of killed writers of this name
    are removed. Raises StorageError if the disk fails; the old file is then untouched.
    """
    path = Path(path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        temporary = _new_name(path)
        try:
            with open(temporary, mode.replace("w", "x"), opener=_open_locked, **text) as file:  # type: ignore[call-overload]
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)  # before the lock ends
                with suppress(FileNotFoundError):  # another process that saw the file has renamed its folder
                    fsync_folder(path.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{path}: could not be written: {error.strerror or error}; an older file of this name is untouched"
        ) from error


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Create a folder of this process beside ``path``, which is removed when the block ends.

    Folders of killed processes are removed first. Raises OSError.
    """
    folder = _new_name(path)
    folder.mkdir()
    descriptor = _open_locked(folder, os.O_RDONLY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _new_name(path: Path) -> Path:
    """Return a name for a temporary file or folder beside ``path``, after what killed writers of ``path`` left.

    Active writers hold a lock on theirs, also on another host. If the file system has no locks, nothing is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"
    for name in fnmatch.filter(os.listdir(path.parent), names):  # an error where the fsync will fail
        leftover = path.parent / name
        with suppress(OSError):
            descriptor = os.open(leftover, os.O_RDONLY if leftover.is_dir() else os.O_RDWR)
            try:
                if take_lock(descriptor):
                    _remove(leftover)
            finally:
                os.close(descriptor)
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")


def _open_locked(path: Path | str, flags: int) -> int:
    """Open a new file, or a folder of this process, and lock it so that others keep it."""
    descriptor = os.open(path, flags, 0o666)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for a writer that takes it for a leftover
    if os.path.exists(path) or not flags & os.O_CREAT:
        return descriptor
    os.close(descriptor)
    return _open_locked(path, flags)


def refuse_to_overwrite(inputs: Iterable[Path | None], outputs: Iterable[Path], remedy: str) -> None:
    """Raise ConfigError if an output is the same file as an input: by name, link, or hard link.

    remedy: advice, such as "choose another --output". None among the inputs stands for one that was not given.
    """
    there = [path for path in outputs if path.exists()]
    for source in inputs:
        if source is None or not source.exists():
            continue
        for target in there:
            if os.path.samefile(source, target):
                name = str(source) if source == target else f"{source}, which is the same file as {target},"
                raise ConfigError(f"{name} is both an input and an output, and would be lost; {remedy}")


_REPLACED = ".replaced.tmp"


def put_in_place(folder: Path, target: Path) -> None:
    """Rename ``folder``, whose files are durable, to ``target``; an existing target is removed last.

    Raises OSError, nothing lost.
    """
    replaced = target.with_name(f".{target.name}{_REPLACED}")
    if target.exists():
        os.replace(target, replaced)
    try:
        os.replace(folder, target)
    except BaseException:  # after a signal too
        if replaced.exists():
            os.replace(replaced, target)
        raise
    fsync_folder(target.parent)
    with suppress(OSError):
        _remove(replaced)


def put_back(parent: Path, names: str) -> None:
    """Restore folders with these names (a glob) whose replacement a killed process has not put in place.

    Raises OSError.
    """
    for replaced in parent.glob(f".{names}{_REPLACED}"):
        target = parent / replaced.name[1:].removesuffix(_REPLACED)
        if target.exists():
            _remove(replaced)
        else:
            os.replace(replaced, target)


def clean_up(parent: Path, names: str) -> None:
    """Call ``put_back``, and remove .NAME.tmp, of which there is no other writer now. Raises OSError."""
    put_back(parent, names)
    for leftover in parent.glob(f".{names}.tmp"):
        _remove(leftover)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path, *, what: str, remedy: str) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to ``folder`` at the end; an older one stays until then.

    Raises StorageError with ``remedy`` if the disk fails.
    """
    try:
        put_back(folder.parent, glob.escape(folder.name))
        with temporary_folder(folder) as temporary:
            yield temporary
            fsync_folder(temporary)
            put_in_place(temporary, folder)
    except (OSError, StorageError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise StorageError(f"{folder}: {what} could not be written: {reason}; {remedy}") from error


def fsync_folder(folder: Path) -> None:
    """Make the names inside ``folder`` durable; a power cut may undo a rename without it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held_lock(path: Path, seconds: float, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a lock file for the block. The file stays, and nobody needs to remove it.

    on_wait: called once, where another process holds it. Raises TimeoutError after ``seconds``, and
    OSError if the file cannot be written.
    """
    from filelock import FileLock, Timeout  # --help of run_gpt2.py loads no library

    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire(timeout=seconds)
    try:
        yield
    finally:
        lock.release()


def take_lock(file: IO[bytes] | IO[str] | int, *, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed or this process ends.

    Returns False where another process holds it. Raises OSError if the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Locks between processes, which end with the process that holds them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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


def take_lock(file: IO[bytes] | IO[str] | int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file or folder until it is closed or this process ends.

    Returns False where another process holds it. Raises OSError if the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True

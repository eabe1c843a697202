"""Locks between processes, which end with the process that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def held_lock(
    path: Path, seconds: float, on_wait: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Hold a lock file for the block. The file stays, and nobody needs to remove it.

    on_wait: called once, where another process holds it. Raises TimeoutError after ``seconds``, and
    OSError if the file cannot be written.
    """
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

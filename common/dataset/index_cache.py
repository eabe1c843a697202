"""Epoch orders kept on disk beside the data: built once by whichever process comes first, then shared by memory map."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.dataset.epoch_index import EpochIndex

_log = logging.getLogger(__name__)
_FIELDS = ("sources", "stream", "first_piece", "shuffle")
_POLL_SECONDS = 0.05
_STALE_SECONDS = 600.0


def cached_epoch(folder: Path, key: str, build: Callable[[], EpochIndex], wait_seconds: float = 120.0) -> EpochIndex:
    """The order ``key`` from ``folder``, built and stored there when absent.

    Several processes may call this at once: one builds, the others wait for it, ``wait_seconds`` at most, and then build for
    themselves. A folder that cannot be written costs a warning and the time to build, never the run.
    """
    target = folder / key
    stored = _load(target)
    if stored is not None:
        return stored
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / f"{key}.lock"
        if not _acquire(lock, target, wait_seconds):
            return _load(target) or build()
    except OSError as error:
        _log.warning("%s: the sample index cannot be cached (%s); it is built in memory", folder, error.strerror or error)
        return build()
    try:
        stored = _load(target)  # it may have been finished between the look and the lock
        if stored is not None:
            return stored
        index = build()
        try:
            _store(target, index)
        except OSError as error:
            _log.warning("%s: the sample index cannot be cached (%s); it stays in memory", folder, error.strerror or error)
            return index
        return _load(target) or index
    finally:
        lock.unlink(missing_ok=True)


def _acquire(lock: Path, target: Path, wait_seconds: float) -> bool:
    """True: this process builds. False: another one has built, or the wait was too long. Raises OSError."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            if _abandoned(lock):
                lock.unlink(missing_ok=True)
                continue
            if target.is_dir() or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
            continue
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{os.uname().nodename} {os.getpid()}\n")
        return True


def _abandoned(lock: Path) -> bool:
    """Whether the lock's owner is dead (which can be told on its own machine), or has held it for longer than any build takes."""
    try:
        age = time.time() - lock.stat().st_mtime
        host, _, pid = lock.read_text().strip().partition(" ")
    except (OSError, UnicodeDecodeError):
        return False
    if age > _STALE_SECONDS:
        return True
    if host != os.uname().nodename or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _store(target: Path, index: EpochIndex) -> None:
    """All arrays or none: written into a folder of another name, which is then renamed."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for name in _FIELDS:
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, getattr(index, name), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)  # only a broken one can be here
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load(target: Path) -> EpochIndex | None:
    try:
        arrays = {name: np.asarray(np.load(target / f"{name}.npy", mmap_mode="r", allow_pickle=False)) for name in _FIELDS}
    except (OSError, ValueError, EOFError):
        return None
    pieces, windows = len(arrays["sources"]), len(arrays["shuffle"])
    if len(arrays["stream"]) != pieces + 1 or len(arrays["first_piece"]) != windows + 1:
        return None
    return EpochIndex(**arrays)

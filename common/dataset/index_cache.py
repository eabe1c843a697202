"""Epoch orders cached on disk beside the data.

The first process that needs an order builds it. The others share it by memory map.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

from common.dataset.epoch_index import EpochIndex
from common.errors import DataError, StopRequested
from common.files import temporary_folder
from common.locks import held_lock
from common.structured_files import read_json_mapping

_log = logging.getLogger(__name__)
_FIELDS = ("sources", "stream", "first_piece", "shuffle")
_CHECKSUMS = "checksums.json"
LOCK = ".lock"


def cached_epoch(
    folder: Path,
    key: str,
    build: Callable[[], EpochIndex],
    wait_seconds: float = 120.0,
    fits: Callable[[EpochIndex], bool] = lambda index: True,
) -> EpochIndex:
    """Return the order ``key`` from ``folder``.

    It is built and stored if it is absent or damaged, or if ``fits`` is false for it. Several
    processes may call this at once. One builds, and the others wait up to ``wait_seconds`` before
    they build for themselves.
    A folder that cannot be written costs a warning and the time to build, never the run. Every
    process compares the checksums of what it reads: 1 s for 1 to 3 GB, less than the disk takes.
    """
    target, index = folder / key, None
    stored = _load(target, fits)
    if stored is not None:
        return stored
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held_lock(folder / LOCK, wait_seconds):
            stored = _load(target, fits)  # another process may have built it by now
            if stored is not None:
                return stored
            if target.exists():
                _log.warning(
                    "%s: the cached sample index is damaged, or was written by an older release; it"
                    " is built again",
                    target,
                )
            index = build()
            _store(target, index)
            return _load(target, fits) or index
    except OSError as error:
        _log.warning(
            "%s: the sample index cannot be cached (%s); it stays in memory",
            folder,
            error.strerror or error,
        )
        return index or build()


def _store(target: Path, index: EpochIndex) -> None:
    """Store all arrays or none, in a temporary folder that is then renamed. Raises OSError."""
    with temporary_folder(target) as temporary:
        for name in _FIELDS:
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, getattr(index, name), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        sums = {name: _sum_of(temporary / f"{name}.npy") for name in _FIELDS}
        with (temporary / _CHECKSUMS).open("w", encoding="utf-8") as text:
            json.dump(sums, text)
            text.flush()
            os.fsync(text.fileno())
        shutil.rmtree(target, ignore_errors=True)  # only a broken order can be here
        os.rename(temporary, target)


def _sum_of(path: Path) -> dict[str, int]:
    """Return the size and the CRC-32 of a file. Raises OSError, and ValueError for an empty one."""
    return {
        "bytes": path.stat().st_size,
        "crc32": zlib.crc32(np.memmap(path, dtype=np.uint8, mode="r").data),
    }


def _is_unchanged(path: Path, stored: Any) -> bool:
    """Return whether a file still has the stored size and CRC-32.

    Sizes come first: opening a pipe would wait for a writer, and a sparse file could have any size.
    """
    found = path.stat()
    return (
        S_ISREG(found.st_mode)
        and isinstance(stored, dict)
        and stored.get("bytes") == found.st_size
        and stored == _sum_of(path)
    )


def _load(target: Path, fits: Callable[[EpochIndex], bool]) -> EpochIndex | None:
    """Return the stored order, mapped. None if there is none, or if it has changed."""
    if not target.is_dir():
        return None
    try:
        sums = read_json_mapping(target / _CHECKSUMS, error=DataError)
        if not all(_is_unchanged(target / f"{name}.npy", sums.get(name)) for name in _FIELDS):
            return None
        arrays = {
            name: np.asarray(np.load(target / f"{name}.npy", mmap_mode="r", allow_pickle=False))
            for name in _FIELDS
        }
        index = EpochIndex(**arrays)
        return index if fits(index) else None
    except StopRequested:
        raise
    except (
        Exception
    ):  # numpy's reader of headers raises almost anything, tokenize.TokenError among it
        return None

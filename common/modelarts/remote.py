"""Copies from URLs (once per host) and to URLs: complete or absent, with retries."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from common.checkpoint.folders import LATEST
from common.checkpoint.manifest import MANIFEST
from common.errors import DataError, StorageError, UserError
from common.files import atomic_write
from common.locks import held_lock
from common.log import LOG
from common.modelarts.stores import RemoteStore, StoredFile, base_name, find_store

T = TypeVar("T")
_COPY_SECONDS = 7200.0
"""Seconds to wait for another process of this host that copies."""
_PAUSES = (5.0, 10.0)
"""Seconds before the second and the third attempt."""


def pull_once(url: str, folder: Path) -> Path:
    """Copy ``url`` to ``folder`` unless the copy is current; one process of this host copies for
    all.

    Returns the path of the copy. An existing folder is complete, since a copy is made beside it and
    renamed; the list of its source's files is a hidden file beside it. Raises DataError for an
    empty URL and StorageError for a failed copy.
    """
    record = folder.with_name(f".{folder.name}.complete")
    with _one_of_host(folder.with_name(f".{folder.name}.lock"), url):
        store, there = find_store(url), files(url)
        wanted = json.dumps({"url": url, "files": there}, ensure_ascii=False)
        if folder.is_dir() and record.is_file():
            if record.read_bytes() == wanted.encode():
                LOG.info(f"{url} has not changed: its copy is used, {folder}")
                return _copied(url, folder)
            LOG.warning(f"{url} has changed: its copy is replaced, {folder}")
        if not there:
            raise DataError(
                f"{url}: no files there; check the address (of a .bin/.idx pair: its folder), and"
                " the permissions of this job"
            )
        LOG.info(f"copying {url} to {folder}")
        _try(lambda: _pull(store, url, folder), f"{url}: could not be copied to {folder}")
        with atomic_write(record, "w") as file:
            file.write(wanted)
    return _copied(url, folder)


def _copied(url: str, folder: Path) -> Path:
    """Return the file if the URL is one, else the folder."""
    inside = list(folder.iterdir())
    is_file = len(inside) == 1 and inside[0].is_file() and inside[0].name == base_name(url)
    return inside[0] if is_file else folder


def files(url: str) -> list[StoredFile]:
    """List the files below a URL at any depth; empty if there are none.

    Raises StorageError if the store does not answer.
    """
    store = find_store(url)
    return _try(lambda: store.files(url), f"{url}: the store does not answer")


def read(url: str) -> bytes:
    """Return the content of one small file. Raises StorageError."""
    store = find_store(url)
    with tempfile.TemporaryDirectory() as folder:
        _try(lambda: store.pull(url, Path(folder)), f"{url}: could not be read")
        return (Path(folder) / base_name(url)).read_bytes()


def push(folder: Path, url: str, *, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Copy files of a folder to a URL: those whose relative names ``wanted`` accepts, but no hidden
    ones.

    The files that make a checkpoint complete come after its content. A copy that is cut off at any
    file is therefore a run that can resume. Raises StorageError.
    """
    names = [name for name in _upload_order(folder) if wanted(name)]
    if not names:
        return
    LOG.info(f"copying {len(names)} files of {folder} to {url}")
    store = find_store(url)
    _try(
        lambda: store.push(folder, names, url),
        f"{url}: {folder} could not be copied there, and is still here",
    )


def _pull(store: RemoteStore, url: str, folder: Path) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    store.pull(url, part)
    if not any(part.iterdir()):
        raise StorageError(f"no files arrived in {part}")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(part, folder)


def _upload_order(folder: Path) -> list[str]:
    """Return the names of all files, except hidden ones, which are locks and temporary files."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    return [
        path.as_posix()
        for path in sorted(
            visible, key=lambda path: (path.name == LATEST, path.name == MANIFEST, path)
        )
    ]


def _try(action: Callable[[], T], what: str) -> T:
    for pause in (*_PAUSES, None):
        try:
            return action()
        except UserError:
            raise
        except Exception as error:  # a store may raise any exception
            reason = str(error) or type(error).__name__
            if pause is None:
                raise StorageError(f"{what} ({reason}); tried {len(_PAUSES) + 1} times") from None
            LOG.warning(f"{what} ({reason}); trying again in {pause:g} s")
            time.sleep(pause)
    raise AssertionError


@contextmanager
def _one_of_host(lock: Path, url: str) -> Iterator[None]:
    """Hold a lock that ends with the process, and wait for it with a message.

    Raises StorageError after _COPY_SECONDS.
    """
    with ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            told = f"waiting for another process of this host, which copies {url}"
            stack.enter_context(held_lock(lock, _COPY_SECONDS, lambda: LOG.warning(told)))
        except TimeoutError:
            raise StorageError(
                f"{url}: another process of this host has been copying it for more than"
                f" {_COPY_SECONDS:g} s; see its log"
            ) from None
        except OSError as error:
            raise StorageError(
                f"{lock.parent}: cannot be written: {error.strerror}; choose a writable folder for"
                f" {url}"
            ) from None
        yield

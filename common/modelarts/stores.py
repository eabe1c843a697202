"""Copies from URLs (once per host) and to URLs: complete or absent.

A store is OBS through ModelArts' moxing, which tries again by itself, or a folder, which may be a
mounted bucket. Each file of the output is tried three times in either.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.checkpoint.folders import LATEST
from common.checkpoint.manifest import MANIFEST
from common.errors import ConfigError, DataError, StorageError, UserError
from common.files import atomic_write, held_lock
from common.log import LOG

_COPY_SECONDS = 7200.0
"""Seconds to wait for another process of this host that copies."""
_PAUSES = (5.0, 10.0)
"""Seconds before the second and third try of a file of the output."""


def base_name(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def join(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"


def find_store(url: str) -> Any:
    """Return what has the functions of ``moxing.file`` for a URL. Raises ConfigError if moxing is needed and absent."""
    if url.startswith("file://"):
        return Folders
    try:
        from moxing import file

        if hasattr(file, "copy_parallel"):  # the moxing of PyPI is another project
            return file
    except (ImportError, OSError):
        pass
    raise ConfigError(
        f"{url}: ModelArts' moxing cannot be imported; use one of ModelArts' images, or mount the"
        " bucket, or let the platform copy the job's input and output, and give the folder"
    )


class Folders:
    """The functions of ``moxing.file`` that are used here, for ``file://``."""

    @staticmethod
    def exists(url: str) -> bool:
        return _path(url).exists()

    @staticmethod
    def is_directory(url: str) -> bool:
        return _path(url).is_dir()

    @staticmethod
    def list_directory(url: str, *, recursive: bool) -> list[str]:
        return [path.relative_to(_path(url)).as_posix() for path in _path(url).rglob("*")]

    @staticmethod
    def stat(url: str) -> Any:
        found = _path(url).stat()
        return SimpleNamespace(length=found.st_size, mtime_nsec=found.st_mtime_ns, is_directory=_path(url).is_dir())

    @staticmethod
    def copy(source: str, target: str) -> None:
        with _path(source).open("rb") as content, atomic_write(_path(target)) as file:
            shutil.copyfileobj(content, file, 1 << 20)

    @staticmethod
    def copy_parallel(source: str, target: str) -> None:
        shutil.copytree(_path(source), _path(target), dirs_exist_ok=True)


def _path(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def files(url: str) -> list[tuple[str, int, str]]:
    """List name, bytes and time of change of the files below a URL at any depth; empty if there are none.

    Names are relative to the URL, or its last part if the URL is the file; times have the store's format. Raises
    StorageError if the store does not answer.
    """
    store = find_store(url)
    with _named(f"{url}: the store does not answer"):
        if not store.exists(url):
            return []
        names = {base_name(url): url}
        if store.is_directory(url):
            found = (str(name) for name in store.list_directory(url, recursive=True))
            names = {name: join(url, name) for name in found if name and not name.endswith("/")}
        states = ((name, store.stat(place)) for name, place in names.items())
        return sorted(
            (name, int(state.length), str(state.mtime_nsec)) for name, state in states if not state.is_directory
        )


def read(url: str) -> bytes:
    """Return the content of one small file. Raises StorageError."""
    with tempfile.TemporaryDirectory() as folder, _named(f"{url}: could not be read"):
        _copy_into(url, Path(folder))
        return (Path(folder) / base_name(url)).read_bytes()


def pull_once(url: str, folder: Path) -> Path:
    """Copy ``url`` to ``folder`` unless the copy is current; one process of this host copies for all.

    Returns the copied file if the URL is one, else the folder. An existing folder is complete, since a copy is made
    beside it and renamed; the list of its source's files is a hidden file beside it. Raises DataError for an empty URL
    and StorageError for a failed copy.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    told = f"waiting for another process of this host, which copies {url}"
    with ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held_lock(lock, _COPY_SECONDS, lambda: LOG.warning(told)))
        except TimeoutError:
            raise StorageError(
                f"{url}: another process of this host has been copying it for more than"
                f" {_COPY_SECONDS:g} s; see its log"
            ) from None
        except OSError as error:
            raise StorageError(
                f"{lock.parent}: cannot be written: {error.strerror}; choose a writable folder for {url}"
            ) from None
        _pull(url, folder)
    inside = list(folder.iterdir())
    is_file = len(inside) == 1 and inside[0].is_file() and inside[0].name == base_name(url)
    return inside[0] if is_file else folder


def _pull(url: str, folder: Path) -> None:
    record, there = folder.with_name(f".{folder.name}.complete"), files(url)
    wanted = json.dumps({"url": url, "files": there}, ensure_ascii=False)
    if folder.is_dir() and record.is_file():
        if record.read_bytes() == wanted.encode():
            LOG.info(f"{url} has not changed: its copy is used, {folder}")
            return
        LOG.warning(f"{url} has changed: its copy is replaced, {folder}")
    if not there:
        raise DataError(
            f"{url}: no files there; check the address (of a .bin/.idx pair: its folder), and"
            " the permissions of this job"
        )
    LOG.info(f"copying {url} to {folder}")
    part = folder.with_name(f".{folder.name}.part")
    with _named(f"{url}: could not be copied to {folder}"):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _copy_into(url, part)
        if not any(part.iterdir()):
            raise StorageError(f"no files arrived in {part}")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(part, folder)
    with atomic_write(record, "w") as file:
        file.write(wanted)


def _copy_into(url: str, folder: Path) -> None:
    store = find_store(url)
    if store.is_directory(url):
        store.copy_parallel(url, str(folder))
    else:
        store.copy(url, str(folder / base_name(url)))


def push(folder: Path, url: str, *, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Copy files of a folder to a URL: those whose relative names ``wanted`` accepts, but no hidden
    ones, which are locks and temporary files. Nothing there is deleted.

    The files that make a checkpoint complete come after its content. A copy that is cut off at any
    file is therefore a run that can resume. Raises StorageError.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    ordered = sorted(visible, key=lambda path: (path.name == LATEST, path.name == MANIFEST, path))
    names = [path.as_posix() for path in ordered if wanted(path.as_posix())]
    if not names:
        return
    LOG.info(f"copying {len(names)} files of {folder} to {url}")
    store = find_store(url)
    with _named(f"{url}: {folder} could not be copied there, and is still here"):
        for name in names:  # copy_parallel keeps no order
            _copy(store, str(folder / name), join(url, name))


def _copy(store: Any, source: str, target: str) -> None:
    """Copy a file, again after a failure, which may be any exception."""
    for pause in _PAUSES:
        try:
            store.copy(source, target)
            return
        except Exception as error:
            why = str(error) or type(error).__name__
            LOG.warning(f"{target} could not be written ({why}); trying again in {pause:g} s")
            time.sleep(pause)
    store.copy(source, target)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn the exceptions of a store, which may be any, into StorageError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise StorageError(f"{what} ({str(error) or type(error).__name__})") from None

"""Copies from URLs (once per host) and to URLs: complete or absent, with retries."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from common.checkpoint.folders import LATEST
from common.checkpoint.manifest import MANIFEST
from common.errors import DataError, StorageError, UserError
from common.files import atomic_write
from common.locks import held_lock
from common.log import LOG
from common.modelarts.stores import RemoteStore, StoredFile, base_name, find_store
from common.structured_files import read_json_mapping

T = TypeVar("T")
_STARTED = time.time()
_PAUSES = (5.0, 10.0)
"""Seconds before the second and the third attempt."""


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """Record beside a copy of its source. made: seconds since 1970."""

    url: str
    files: list[StoredFile]
    made: float


def pull_once(url: str, folder: Path, environ: Mapping[str, str], *, limit: float = 7200.0) -> Path:
    """Copy ``url`` to ``folder`` unless the copy is current; one process of this host copies for
    all.

    Returns the path of the copy. limit: seconds to wait for that process. An existing folder is
    complete, since a copy is made beside it and renamed. Raises DataError for an empty URL and
    StorageError for a failed copy, in every process that waited.
    """
    began = time.time()
    complete, failed = (
        folder.with_name(f".{folder.name}.{state}") for state in ("complete", "failed")
    )
    with _one_of_host(folder.with_name(f".{folder.name}.lock"), url, limit):
        copy = _read_copy(complete) if folder.is_dir() else None
        # otherwise another process made it meanwhile
        if copy is None or copy.url != url or copy.made < began:
            if failed.is_file() and failed.stat().st_mtime >= began:
                raise StorageError(failed.read_text(encoding="utf-8"))
            try:
                _renew(copy, url, folder, environ)
            except StorageError as error:
                with atomic_write(failed, "w") as file:
                    file.write(str(error))
                raise
    inside = list(folder.iterdir())
    is_file = len(inside) == 1 and inside[0].is_file() and inside[0].name == base_name(url)
    return inside[0] if is_file else folder


def files(url: str, environ: Mapping[str, str]) -> list[StoredFile]:
    """List the files below a URL at any depth; empty if there are none.

    Raises StorageError if the store does not answer.
    """
    store = find_store(url, environ)
    return _try(lambda: store.files(url), f"{url}: the store does not answer")


def read(url: str, environ: Mapping[str, str]) -> bytes:
    """Return the content of one small file. Raises StorageError."""
    store = find_store(url, environ)
    with tempfile.TemporaryDirectory() as folder:
        _try(lambda: store.pull(url, Path(folder)), f"{url}: could not be read")
        return (Path(folder) / base_name(url)).read_bytes()


def push(
    folder: Path,
    url: str,
    environ: Mapping[str, str],
    *,
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Copy files of a folder to a URL: those whose relative names ``wanted`` accepts, but no hidden
    ones.

    The files that make a checkpoint complete come after its content. A copy that is cut off at any
    file is therefore a run that can resume. Raises StorageError.
    """
    names = [name for name in _upload_order(folder) if wanted(name)]
    if not names:
        return
    LOG.info(f"copying {len(names)} files of {folder} to {url}")
    store = find_store(url, environ)
    _try(
        lambda: store.push(folder, names, url),
        f"{url}: {folder} could not be copied there, and is still here",
    )


def _renew(copy: _Copy | None, url: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Keep the copy if its source has not changed, else make it again."""
    began = time.time()
    there = files(url, environ)
    if copy is not None and copy.url == url:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(copy.made))
        if copy.files == there:
            if copy.made < _STARTED:
                LOG.info(
                    f"{url} has not changed since {made}: the copy of that time is used, {folder}"
                )
            return
        LOG.warning(f"{url} has changed since {made}: the copy of that time is replaced")
    if not there:
        raise DataError(
            f"{url}: no files there; check the address (of a .bin/.idx pair: its folder), and the"
            " permissions of this job"
        )
    LOG.info(f"copying {url} to {folder}")
    store = find_store(url, environ)
    _try(lambda: _pull(store, url, folder), f"{url}: could not be copied to {folder}")
    made_now = _Copy(url=url, files=there, made=time.time())
    with atomic_write(folder.with_name(f".{folder.name}.complete"), "w") as file:
        json.dump(asdict(made_now) | {"seconds": round(made_now.made - began, 1)}, file)


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
            reason = (
                str(error)
                if isinstance(error, OSError | StorageError)
                else f"{type(error).__name__}: {error}"
            )
            if pause is None:
                raise StorageError(f"{what} ({reason}); tried {len(_PAUSES) + 1} times") from None
            LOG.warning(f"{what} ({reason}); trying again in {pause:g} s")
            time.sleep(pause)
    raise AssertionError


@contextmanager
def _one_of_host(lock: Path, url: str, limit: float) -> Iterator[None]:
    """Hold a lock that ends with the process, and wait for it with a message.

    Raises StorageError after ``limit`` seconds.
    """
    with ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            told = f"waiting for another process of this host, which copies {url}"
            stack.enter_context(held_lock(lock, limit, lambda: LOG.warning(told)))
        except TimeoutError:
            raise StorageError(
                f"{url}: another process of this host has been copying it for more than {limit:g}"
                " s; see its log"
            ) from None
        except OSError as error:
            raise StorageError(
                f"{lock.parent}: cannot be written: {error.strerror}; choose a writable folder for"
                f" {url}"
            ) from None
        yield


def _read_copy(complete: Path) -> _Copy | None:
    try:
        record = read_json_mapping(complete, error=DataError)
        time.localtime(record["made"])  # as it will be shown
        return _Copy(
            url=record["url"],
            files=[StoredFile(**file) for file in record["files"]],
            made=float(record["made"]),
        )
    except (DataError, OSError, ValueError, KeyError, TypeError, OverflowError):
        return None

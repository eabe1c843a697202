"""Files that lie elsewhere: copied here once per host, and results copied back. OBS through moxing or its SDK, or a plain folder."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from common.errors import ConfigError, DataError, StorageError, UserError
from common.files import atomic_write
from common.training.log import LOG

T = TypeVar("T")
SCHEMES = ("obs", "s3", "file")
_SMALL = 9 << 20  # of the OBS SDK's uploads: below it one request, above it parts


class RemoteStore(Protocol):
    """Where URLs lead. A failed call raises any exception; the callers below try again."""

    def exists(self, url: str) -> bool: ...

    def pull(self, url: str, folder: Path) -> None:
        """Copy what lies under ``url`` into an existing folder; of a URL that is one file, that file."""

    def push(self, folder: Path, url: str) -> None:
        """Copy what is in ``folder``, hidden files apart, over what lies under ``url``. Nothing there is deleted."""


def is_url(text: str) -> bool:
    return text.partition("://")[0] in SCHEMES and "://" in text


def base_name(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def find_store(url: str, environ: Mapping[str, str]) -> RemoteStore:
    """The store for a URL, by its scheme and what can be imported. Raises ConfigError that says what is missing."""
    scheme = url.partition("://")[0]
    if not is_url(url):
        raise ConfigError(f"{url}: expected a URL that starts with {', '.join(f'{name}://' for name in SCHEMES)}")
    if scheme == "file":
        return FolderStore()
    moxing = getattr(_import("moxing"), "file", None)
    if hasattr(moxing, "copy_parallel"):  # the moxing of PyPI is another project
        return MoxingStore(moxing)
    sdk = _import("obs")
    if hasattr(sdk, "ObsClient"):
        return ObsStore(_client(sdk, url, environ))
    raise ConfigError(
        f"{url}: neither ModelArts' moxing nor the OBS SDK can be imported; pip install esdk-obs-python, take one of ModelArts' images,"
        " or mount the bucket and give its folder"
    )


def pull_once(url: str, folder: Path, environ: Mapping[str, str], *, limit: float = 7200.0, attempts: int = 3, pause: float = 5.0) -> Path:
    """Copy ``url`` to ``folder`` unless it is there; of all processes of this host that ask, one does it. Returns where it lies.

    limit: seconds to wait for that one. attempts, pause: as in ``push``. A folder that is there is whole: the copy is made beside it
    and renamed. Raises DataError for an empty URL and StorageError for a failed copy, on every process that waited for it.
    """
    began = time.time()
    complete, failed = (folder.with_name(f".{folder.name}.{state}") for state in ("complete", "failed"))
    with _one_of_host(folder.with_name(f".{folder.name}.lock"), url, limit):
        if _url_of(complete) != url or not folder.is_dir():
            if failed.is_file() and failed.stat().st_mtime >= began:
                raise StorageError(failed.read_text(encoding="utf-8"))
            LOG.info(f"copying {url} to {folder}")
            store = find_store(url, environ)
            try:
                _try(lambda: _pull(store, url, folder), f"{url}: could not be copied to {folder}", attempts, pause)
            except StorageError as error:
                with atomic_write(failed, "w") as file:
                    file.write(str(error))
                raise
            with atomic_write(complete, "w") as file:
                json.dump({"url": url, "seconds": round(time.time() - began, 1)}, file)
    inside = list(folder.iterdir())
    is_file = len(inside) == 1 and inside[0].is_file() and inside[0].name == base_name(url)
    return inside[0] if is_file else folder


def exists(url: str, environ: Mapping[str, str], *, attempts: int = 3, pause: float = 5.0) -> bool:
    """Whether anything lies there. Raises StorageError when the store does not answer."""
    store = find_store(url, environ)
    return _try(lambda: store.exists(url), f"{url}: the store does not answer", attempts, pause)


def push(folder: Path, url: str, environ: Mapping[str, str], *, attempts: int = 3, pause: float = 5.0) -> None:
    """Copy a folder's content to a URL. attempts: how often to try; the pause between them, in seconds, doubles. Raises StorageError."""
    if not folder.is_dir():
        LOG.warning(f"{folder}: nothing was written there, so nothing is copied to {url}")
        return
    LOG.info(f"copying {folder} to {url}")
    store = find_store(url, environ)
    _try(lambda: store.push(folder, url), f"{url}: {folder} could not be copied there, and is still here", attempts, pause)


def _pull(store: RemoteStore, url: str, folder: Path) -> None:
    if not store.exists(url):
        raise DataError(f"{url}: there is nothing; check the address (of a .bin/.idx pair: its folder), and the rights of this job")
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    store.pull(url, part)
    if not any(part.iterdir()):
        raise DataError(f"{url}: the folder is empty; check the address")
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(part, folder)


def _try(action: Callable[[], T], what: str, attempts: int, pause: float) -> T:
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except UserError:
            raise
        except Exception as error:  # what a store raises is its own affair
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, OSError | StorageError) else str(error)
            if attempt == attempts:
                raise StorageError(f"{what} ({reason}); tried {attempts} times") from None
            LOG.warning(f"{what} ({reason}); trying again in {pause:g} s")
            time.sleep(pause)
            pause *= 2
    raise AssertionError


@contextmanager
def _one_of_host(lock: Path, url: str, limit: float) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends; wait for it, and say so. Raises StorageError after ``limit`` seconds."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise StorageError(f"{lock.parent}: cannot be written: {error.strerror}; there is no place for {url}") from None
    with file:
        deadline, told = time.monotonic() + limit, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    LOG.warning(f"waiting for another process of this host, which copies {url}")
                    told = True
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"{url}: another process of this host copies it for more than {limit:g} s; look into its log"
                    ) from None
                time.sleep(0.2)
        yield


def _url_of(marker: Path) -> str | None:
    try:
        return str(json.loads(marker.read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---- the stores ----


class FolderStore:
    """``file://`` and a path: a bucket that is mounted, or a test's."""

    def exists(self, url: str) -> bool:
        return _folder_of(url).exists()

    def pull(self, url: str, folder: Path) -> None:
        source = _folder_of(url)
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
        else:
            shutil.copytree(source, folder, dirs_exist_ok=True)

    def push(self, folder: Path, url: str) -> None:
        for path in _visible_files(folder):
            target = _folder_of(url) / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            shutil.copyfile(path, unfinished)
            os.replace(unfinished, target)


@dataclass(frozen=True)
class MoxingStore:
    """ModelArts' own library; it has the job's rights. file: what it calls moxing.file."""

    file: Any

    def exists(self, url: str) -> bool:
        return bool(self.file.exists(url))

    def pull(self, url: str, folder: Path) -> None:
        if self.file.is_directory(url):
            self.file.copy_parallel(url, str(folder))
        else:
            self.file.copy(url, str(folder / base_name(url)))

    def push(self, folder: Path, url: str) -> None:
        self.file.copy_parallel(str(folder), url)


@dataclass(frozen=True)
class ObsStore:
    """The SDK esdk-obs-python. client: its ObsClient, whose calls return a record with status, errorCode and errorMessage."""

    client: Any

    def exists(self, url: str) -> bool:
        return next(self._objects(url), None) is not None

    def pull(self, url: str, folder: Path) -> None:
        bucket, key = _bucket_and_key(url)
        for name, size in self._objects(url):
            inner = name.removeprefix(key).lstrip("/") or base_name(url)
            target = folder / inner
            if name.endswith("/"):
                continue
            if ".." in Path(inner).parts:
                raise DataError(f"{url}: the object {name!r} would be written outside of {folder}; rename it")
            target.parent.mkdir(parents=True, exist_ok=True)
            if size == 0:
                target.touch()
            elif size <= _SMALL:
                self._call("getObject", url, bucket, name, downloadPath=str(target))
            else:
                self._call("downloadFile", url, bucket, name, downloadFile=str(target), taskNum=4)
            if target.stat().st_size != size:
                raise StorageError(f"{url}: {name} has {size} bytes, {target.stat().st_size} arrived")

    def push(self, folder: Path, url: str) -> None:
        bucket, key = _bucket_and_key(url)
        for path in _visible_files(folder):
            name = "/".join(part for part in (key.rstrip("/"), path.relative_to(folder).as_posix()) if part)
            if path.stat().st_size <= _SMALL:
                self._call("putFile", url, bucket, name, str(path))
            else:
                self._call("uploadFile", url, bucket, name, str(path), taskNum=4)

    def _objects(self, url: str) -> Iterator[tuple[str, int]]:
        """Name and size of what lies under the URL: the object of this name, or all of the folder."""
        bucket, key = _bucket_and_key(url)
        folder = f"{key.rstrip('/')}/" if key else ""
        marker = None
        while True:
            body = self._call("listObjects", url, bucket, prefix=key.rstrip("/") or None, marker=marker, max_keys=1000).body
            for item in body.contents or []:
                if item.key == key or item.key.startswith(folder):
                    yield item.key, int(item.size)
            if not body.is_truncated:
                return
            marker = body.next_marker

    def _call(self, method: str, url: str, *words: Any, **options: Any) -> Any:
        answer = getattr(self.client, method)(*words, **options)
        if answer.status >= 300:
            raise StorageError(
                f"{url}: {method}: OBS answered {answer.status} {answer.errorCode or ''} {answer.errorMessage or ''}".rstrip()
            )
        return answer


def _client(sdk: Any, url: str, environ: Mapping[str, str]) -> Any:
    """Keys from the environment alone: OBS_* as the SDK names them, or S3_* as ModelArts sets them."""

    def value(name: str) -> str | None:
        return environ.get(f"OBS_{name}") or environ.get(f"S3_{name}") or None

    names = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT")
    missing = [f"OBS_{name}" for name in names if not value(name)]
    if missing:
        raise ConfigError(f"{url}: the OBS SDK needs {', '.join(missing)} in the environment; set {'it' if len(missing) == 1 else 'them'}")
    key, secret, server = (value(name) for name in names)
    return sdk.ObsClient(access_key_id=key, secret_access_key=secret, server=server, security_token=value("SECURITY_TOKEN"))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _bucket_and_key(url: str) -> tuple[str, str]:
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise ConfigError(f"{url}: names no bucket; expected obs://BUCKET/FOLDER")
    return bucket, key


def _folder_of(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def _visible_files(folder: Path) -> list[Path]:
    """Hidden files are locks and what is under way."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))

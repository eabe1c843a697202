"""Stores behind URLs: OBS through moxing or its SDK, or a plain folder."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.errors import ConfigError, DataError, StorageError
from common.files import atomic_write

SCHEMES = ("obs", "s3", "file")
_SMALL = 9 << 20  # limit of the OBS SDK's uploads: below it one request, above it parts


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file. name: relative to the URL, or its last part if the URL is this file. changed: time
    in the store's format.
    """

    name: str
    bytes: int
    changed: str


class RemoteStore(Protocol):
    """Store of files. A failed call raises any exception; the callers try again."""

    def files(self, url: str) -> list[StoredFile]:
        """List the files under ``url`` at any depth; empty for a missing URL or an empty folder."""

    def pull(self, url: str, folder: Path) -> None:
        """Copy the files under ``url``, or the one file that it is, into an existing folder."""

    def push(self, folder: Path, files: Sequence[str], url: str) -> None:
        """Copy these files of ``folder``, in this order, to ``url``. Nothing there is deleted."""


def is_url(text: str) -> bool:
    return text.partition("://")[0] in SCHEMES and "://" in text


def base_name(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def join(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"


def find_store(url: str, environ: Mapping[str, str]) -> RemoteStore:
    """Return the store for a URL, by its scheme and the importable packages.

    Raises ConfigError that names a missing package.
    """
    scheme = url.partition("://")[0]
    if not is_url(url):
        raise ConfigError(
            f"{url}: expected a URL that starts with {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    if scheme == "file":
        return FolderStore()
    moxing = getattr(_import("moxing"), "file", None)
    if hasattr(moxing, "copy_parallel"):  # the moxing of PyPI is another project
        return MoxingStore(moxing)
    sdk = _import("obs")
    if hasattr(sdk, "ObsClient"):
        return ObsStore(_client(sdk, url, environ))
    raise ConfigError(
        f"{url}: neither ModelArts' moxing nor the OBS SDK can be imported; pip install"
        " esdk-obs-python, use one of ModelArts' images, or mount the bucket and give its folder"
    )


class FolderStore:
    """Folder of ``file://`` or a path: a mounted bucket, or one of a test."""

    def files(self, url: str) -> list[StoredFile]:
        source = _folder_of(url)
        paths = (
            [source]
            if source.is_file()
            else sorted(path for path in source.rglob("*") if path.is_file())
        )
        top = source.parent if source.is_file() else source
        return [
            StoredFile(
                name=path.relative_to(top).as_posix(),
                bytes=status.st_size,
                changed=str(status.st_mtime_ns),
            )
            for path, status in ((path, path.stat()) for path in paths)
        ]

    def pull(self, url: str, folder: Path) -> None:
        source = _folder_of(url)
        if source.is_file():
            shutil.copyfile(source, folder / source.name)
        else:
            shutil.copytree(source, folder, dirs_exist_ok=True)

    def push(self, folder: Path, files: Sequence[str], url: str) -> None:
        for name in files:
            with (
                (folder / name).open("rb") as source,
                atomic_write(_folder_of(url) / name) as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)


@dataclass(frozen=True)
class MoxingStore:
    """ModelArts' own library, which has the job's permissions. file: its module moxing.file."""

    file: Any

    def files(self, url: str) -> list[StoredFile]:
        if not self.file.exists(url):
            return []
        if not self.file.is_directory(url):
            return [self._record(base_name(url), self.file.stat(url))]
        names = (str(name) for name in self.file.list_directory(url, recursive=True))
        found = (
            (name, self.file.stat(join(url, name)))
            for name in names
            if name and not name.endswith("/")
        )
        return sorted(
            (self._record(name, status) for name, status in found if not status.is_directory),
            key=lambda file: file.name,
        )

    def pull(self, url: str, folder: Path) -> None:
        if self.file.is_directory(url):
            self.file.copy_parallel(url, str(folder))
        else:
            self.file.copy(url, str(folder / base_name(url)))

    def push(self, folder: Path, files: Sequence[str], url: str) -> None:
        for name in files:  # copy_parallel keeps no order
            self.file.copy(str(folder / name), join(url, name))

    @staticmethod
    def _record(name: str, status: Any) -> StoredFile:
        return StoredFile(name=name, bytes=int(status.length), changed=str(status.mtime_nsec))


@dataclass(frozen=True)
class ObsStore:
    """The SDK esdk-obs-python. client: its ObsClient, whose calls return a record with status,
    errorCode and errorMessage.
    """

    client: Any

    def files(self, url: str) -> list[StoredFile]:
        return [
            StoredFile(name=inner, bytes=int(item.size), changed=str(item.lastModified))
            for inner, item in self._objects(url)
        ]

    def pull(self, url: str, folder: Path) -> None:
        bucket, _ = _bucket_and_key(url)
        for inner, item in self._objects(url):
            name, size, target = item.key, int(item.size), folder / inner
            if ".." in Path(inner).parts:
                raise DataError(
                    f"{url}: the object {name!r} would be written outside of {folder}; rename it"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            if size == 0:
                target.touch()
            elif size <= _SMALL:
                self._call("getObject", url, bucket, name, downloadPath=str(target))
            else:
                self._call("downloadFile", url, bucket, name, downloadFile=str(target), taskNum=4)
            if target.stat().st_size != size:
                raise StorageError(
                    f"{url}: {name} has {size} bytes, {target.stat().st_size} arrived"
                )

    def push(self, folder: Path, files: Sequence[str], url: str) -> None:
        bucket, key = _bucket_and_key(url)
        for inner in files:
            path, name = folder / inner, "/".join(part for part in (key.rstrip("/"), inner) if part)
            if path.stat().st_size <= _SMALL:
                self._call("putFile", url, bucket, name, str(path))
            else:
                self._call("uploadFile", url, bucket, name, str(path), taskNum=4)

    def _objects(self, url: str) -> Iterator[tuple[str, Any]]:
        """Yield the object of this name, or all objects of the folder, by their names relative to
        it.

        Markers of folders are left out.
        """
        bucket, key = _bucket_and_key(url)
        folder = f"{key.rstrip('/')}/" if key else ""
        marker = None
        while True:
            body = self._call(
                "listObjects",
                url,
                bucket,
                prefix=key.rstrip("/") or None,
                marker=marker,
                max_keys=1000,
            ).body
            for item in body.contents or []:
                if (item.key == key or item.key.startswith(folder)) and not item.key.endswith("/"):
                    yield item.key.removeprefix(key).lstrip("/") or base_name(url), item
            if not body.is_truncated:
                return
            marker = body.next_marker

    def _call(self, method: str, url: str, *words: Any, **options: Any) -> Any:
        answer = getattr(self.client, method)(*words, **options)
        if answer.status >= 300:
            raise StorageError(
                f"{url}: {method}: OBS answered {answer.status} {answer.errorCode or ''}"
                f" {answer.errorMessage or ''}".rstrip()
            )
        return answer


def _client(sdk: Any, url: str, environ: Mapping[str, str]) -> Any:
    """Create a client with keys from the environment: OBS_* as in the SDK, or S3_* as on
    ModelArts.
    """

    def value(name: str) -> str | None:
        return environ.get(f"OBS_{name}") or environ.get(f"S3_{name}") or None

    names = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT")
    missing = [f"OBS_{name}" for name in names if not value(name)]
    if missing:
        raise ConfigError(
            f"{url}: the OBS SDK needs {', '.join(missing)} in the environment; set"
            f" {'it' if len(missing) == 1 else 'them'}"
        )
    key, secret, server = (value(name) for name in names)
    return sdk.ObsClient(
        access_key_id=key,
        secret_access_key=secret,
        server=server,
        security_token=value("SECURITY_TOKEN"),
    )


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

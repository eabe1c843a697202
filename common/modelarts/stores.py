"""Stores behind URLs: OBS through ModelArts' moxing, or a folder, which may be a mounted bucket."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from common.errors import ConfigError
from common.files import atomic_write

SCHEMES = ("obs", "s3", "file")


class StoredFile(NamedTuple):
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


def find_store(url: str) -> RemoteStore:
    """Return the store for a URL. Raises ConfigError if moxing is needed and not there."""
    if not is_url(url):
        raise ConfigError(
            f"{url}: expected a URL that starts with {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    if url.startswith("file://"):
        return FolderStore()
    try:
        from moxing import file

        if hasattr(file, "copy_parallel"):  # the moxing of PyPI is another project
            return MoxingStore(file)
    except (ImportError, OSError):
        pass
    raise ConfigError(
        f"{url}: ModelArts' moxing cannot be imported; use one of ModelArts' images, or mount the"
        " bucket, or let the platform copy the job's input and output, and give the folder"
    )


class FolderStore:
    """Folder of ``file://``: a mounted bucket, or one of a test."""

    def files(self, url: str) -> list[StoredFile]:
        source = _folder_of(url)
        top = source.parent if source.is_file() else source
        found = []
        for path in sorted([source, *source.rglob("*")]):
            if path.is_file():
                status = path.stat()
                name = path.relative_to(top).as_posix()
                found.append(StoredFile(name, status.st_size, str(status.st_mtime_ns)))
        return found

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
            self._record(name, status) for name, status in found if not status.is_directory
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
        return StoredFile(name, int(status.length), str(status.mtime_nsec))


def _folder_of(url: str) -> Path:
    return Path(url.removeprefix("file://"))

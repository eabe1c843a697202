"""Turn the files of MindSpore's FileWriter into one set under its final names.

Shards then refer to each other, and old files are gone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.dataset.metadata import METADATA_EXTENSION
from common.dataset.mindrecord_file import INDEX_EXTENSION
from common.errors import DataError, StorageError
from common.files import fsync_folder, temporary_folder
from common.structured_files import parse_json


def shard_names(name: str, shards: int) -> list[str]:
    """Return the names that FileWriter(name, shards) gives its files.

    These are NAME, or NAME0, NAME1, ... with as many digits as the last number needs.
    """
    return (
        [name]
        if shards == 1
        else [f"{name}{number:0{len(str(shards - 1))}d}" for number in range(shards)]
    )


@contextmanager
def publication(target: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield a folder beside ``target`` for the files, and move them to their final names on normal
    exit.

    The index files move last: until then, readers report them as missing. An older set of the same
    name is removed after that.
    Raises StorageError if the disk fails; an older set is then back in its place.
    """
    try:
        with temporary_folder(target) as folder:
            yield folder
            _publish(folder, target, names)
    except OSError as error:
        raise StorageError(f"{target}: could not be written: {error.strerror or error}") from error


def _publish(folder: Path, target: Path, names: Sequence[str]) -> None:
    metadata = target.name + METADATA_EXTENSION
    indices = [name + INDEX_EXTENSION for name in names]
    for name in (*names, *indices):
        _flush(folder / name, folder.stat().st_mode & 0o666)
    replaced = folder / "replaced"
    replaced.mkdir()
    moved: list[tuple[Path, Path]] = []
    try:
        for old in earlier_files(target):
            moved.append((old, replaced / old.name))
            os.replace(*moved[-1])
        for name in (*names, *([metadata] if (folder / metadata).exists() else []), *indices):
            moved.append((folder / name, target.with_name(name)))
            os.replace(*moved[-1])
    except BaseException:  # also for a signal
        for here, there in reversed(moved):
            if there.exists() and not here.exists():
                os.replace(there, here)
        raise
    fsync_folder(target.parent)


def join_shards(paths: Sequence[Path]) -> None:
    """Record in files that were written one by one that they are shards of one set.

    A reader that opens one then finds the others. FileWriter could make the set itself. But it
    deals the last rows of each call to shards by chance, so the order would be lost.
    """
    for number, path in enumerate(paths):
        with path.open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length))  # of a file written by this process
            header |= {"shard_addresses": [other.name for other in paths], "shard_id": number}
            for page in header["page"]:
                page["shard_id"] = number
            text = json.dumps(header, separators=(",", ":")).encode()
            if len(text) + 8 > header["header_size"]:
                raise DataError(
                    f"{path}: a set of {len(paths)} shards does not fit its header; write fewer"
                    " shards"
                )
            file.seek(0)
            file.write(len(text).to_bytes(8, "little") + text)


def earlier_files(target: Path) -> list[Path]:
    """Return the files that a new set of this name replaces, whatever their number of shards;
    indices first.
    """
    if not target.parent.is_dir():
        return []
    pattern = re.compile(
        rf"{re.escape(target.name)}"
        rf"(\d*({re.escape(INDEX_EXTENSION)})?|{re.escape(METADATA_EXTENSION)})"
    )
    files = [
        path for path in target.parent.iterdir() if path.is_file() and pattern.fullmatch(path.name)
    ]
    return sorted(files, key=lambda path: (path.suffix != INDEX_EXTENSION, path.name))


def _flush(path: Path, mode: int) -> None:
    path.chmod(
        mode
    )  # FileWriter leaves its files readable only by their owner, whatever the umask says
    with path.open("rb+") as file:
        os.fsync(file.fileno())

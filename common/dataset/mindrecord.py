"""Endless training samples from MindRecord files, and the publication of those that FileWriter has written.

Each row of ``input_ids`` is one sample of seq_length + 1 tokens. Rows come in the order of the
shards and of their row numbers, as MindDataset(shuffle=False) reads them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import numpy as np
import numpy.typing as npt

from common.dataset.fleetx import find_fleetx
from common.dataset.indexed import strip_extension
from common.dataset.metadata import METADATA_EXTENSION
from common.dataset.mindrecord_file import INDEX_EXTENSION, MindRecordFile, looks_like_mindrecord, read_header
from common.dataset.samples import EmptySplitError, Ids, Order, Split, SplitSamples, document_range
from common.dataset.token_files import with_extension
from common.errors import DataError, StorageError
from common.files import fsync_folder, reading, temporary_folder
from common.interrupts import holding_signals
from common.paths import looked_in
from common.structured_files import parse_json

EXTENSION = ".mindrecord"
_NAME = re.compile(rf".+{re.escape(EXTENSION)}\d*")


class MindRecordSamples(SplitSamples):
    """Rows of one split. Counterpart of ``GPTDataset`` for MindRecord.

    source: a file (with its shards), or a folder that is searched. padded: accept rows whose mask
    has a 0.
    Raises DataError if a file is missing or damaged, rows are not seq_length + 1 long, or the split
    is empty.
    """

    _unit = "rows"

    def __init__(
        self, source: str | Path, *, split: Split, seq_length: int, padded: bool = False, **order: Unpack[Order]
    ) -> None:
        super().__init__(split=split, seq_length=seq_length, **order)
        self.files = [MindRecordFile(path, padded=padded) for path in find_mindrecord(source) or ()]
        for file in self.files:
            if len(file) and file.width != seq_length + 1:
                raise DataError(
                    f"{file.path}: its rows hold {file.width} tokens, expected seq_length + 1 = {seq_length + 1}; set"
                    f" model.seq_length={file.width - 1}, or write the file again with --seq-length {seq_length}"
                )
        self._ends = np.cumsum([len(file) for file in self.files], dtype=np.int64)
        total = int(self._ends[-1])
        self._first, end = document_range(split, self.split_weights, total)
        self.samples_per_epoch = end - self._first
        if self.samples_per_epoch < 1:
            weights = ",".join(f"{weight:g}" for weight in self.split_weights)
            raise EmptySplitError(
                f"{self.files[0].path}: the split {split!r} (weights {weights}) holds none of"
                f" {total} rows; write more rows, or give this split a larger weight"
            )
        self.fingerprint = self._digest("mindrecord", [file.content_key for file in self.files])

    def read(self, ids: Ids) -> npt.NDArray[np.int32]:
        """Read samples. ids: (n,) numbers >= 0 in any order. Returns (n, seq_length + 1) int32 tokens."""
        rows = self._windows(ids)[1] + self._first
        out = np.empty((len(rows), self.seq_length + 1), dtype=np.int32)
        numbers = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(numbers):
            mine = numbers == number
            before = int(self._ends[number - 1]) if number else 0
            out[mine] = self.files[number].read(rows[mine] - before)
        return out

    def source(self, sample: int) -> Path:
        row = int(self._windows(np.array([sample]))[1][0]) + self._first
        return self.files[int(np.searchsorted(self._ends, row, side="right"))].path


def find_mindrecord(source: str | Path) -> list[Path] | None:
    """Return the files of a data set in order; None for another format.

    source: a folder, a file, or a file's name without the shard number. A file stands for all
    shards of its set. The name, the files in the folder, or the first bytes of the file decide.
    Raises DataError if there is none of a MindRecord's name, or if one of a set is missing.
    """
    path = Path(source)
    if path.suffix in (".bin", ".idx") or with_extension(path, ".idx").is_file():
        return None
    if path.is_dir():
        files = mindrecords_below(path)
        for file in files:
            _shards(file)
        return files or None
    is_named = _NAME.fullmatch(path.name) is not None
    if path.is_file() or not is_named:
        return _shards(path) if is_named or looks_like_mindrecord(path) else None
    shard = re.compile(rf"{re.escape(path.name)}\d+")
    shards = sorted(file for file in path.parent.glob("*") if shard.fullmatch(file.name))
    if not shards:
        raise DataError(
            f"{path}: not found{looked_in(path)}; a MindRecord is that file and {path.name}{INDEX_EXTENSION}, or"
            f" shards {path.name}0, {path.name}1, ... with a {INDEX_EXTENSION} file each; copy all of them, or write"
            " them with tools/preprocess_data.py --format mindrecord"
        )
    return _shards(shards[0])


def metadata_paths(source: str | Path) -> list[Path]:
    """Return the path of a data set's .meta.json. For shards the name has no number."""
    files = find_mindrecord(source)
    if files is None:
        return [with_extension(find_fleetx(source) or strip_extension(source), METADATA_EXTENSION)]
    names = {*files, *(file.with_name(file.name.rstrip("0123456789")) for file in files)}
    return [with_extension(name, METADATA_EXTENSION) for name in sorted(names)]


def mindrecords_below(folder: Path) -> list[Path]:
    """Return the MindRecord files of a folder and those in it.

    The extension or an index beside the file identifies them: FileWriter accepts any name.
    """
    named = (path for path in folder.rglob(f"*{EXTENSION}*") if _NAME.fullmatch(path.name))
    indexed = (path.with_suffix("") for path in folder.rglob(f"*{INDEX_EXTENSION}"))
    found = {*(path for path in named if path.is_file()), *(path for path in indexed if looks_like_mindrecord(path))}
    # a hidden file is being written, or was left by a process that was killed
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _shards(path: Path) -> list[Path]:
    """Return the set that a file says it belongs to.

    A renamed file is a set by itself; its index reveals the renaming later.
    """
    shards = [path.with_name(name) for name in read_header(path).shards]
    if path not in shards:
        return [path]
    with reading(path, DataError):  # a name may be too long
        missing = next((shard for shard in shards if not shard.is_file()), None)
    if missing is not None:
        raise DataError(
            f"{missing}: not found, but {path.name} says that it is one of {len(shards)} shards; copy all of them"
        )
    return shards


# ---- writing ----


@contextmanager
def publication(target: Path, shards: int) -> Iterator[list[Path]]:
    """Yield where to write each file of a set, and move them to their final names on normal exit.

    These are the names of FileWriter(target, shards): NAME, or NAME0, NAME1, ... with as many digits as the last number
    needs. Files that were written one by one become shards of one set: a reader that opens one then finds the others.
    FileWriter could make the set itself. But it deals the last rows of each call to shards by chance, so the order
    would be lost.
    An older set of the same name goes first. The index files move last: a crash between the renames leaves no set of
    files, never a wrong one. Raises StorageError if the disk fails.
    """
    width = len(str(shards - 1))
    names = [target.name] if shards == 1 else [f"{target.name}{number:0{width}d}" for number in range(shards)]
    metadata, indices = target.name + METADATA_EXTENSION, [name + INDEX_EXTENSION for name in names]
    with new_folder(target) as folder:
        yield [folder / name for name in names]
        for number, name in enumerate(names):
            _join(folder / name, names, number)
        with holding_signals():
            for name in (*names, *indices):
                # FileWriter leaves its files readable only by their owner, whatever the umask says
                (folder / name).chmod(folder.stat().st_mode & 0o666)
                with (folder / name).open("rb+") as file:
                    os.fsync(file.fileno())
            for old in earlier_files(target):
                old.unlink()
            for name in (*names, *([metadata] if (folder / metadata).exists() else []), *indices):
                os.replace(folder / name, target.with_name(name))
            fsync_folder(target.parent)


def _join(path: Path, names: Sequence[str], number: int) -> None:
    """Record in a file that it is this one of a set."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(length))  # of a file written by this process
        header |= {"shard_addresses": names, "shard_id": number}
        for page in header["page"]:
            page["shard_id"] = number
        text = json.dumps(header, separators=(",", ":")).encode()
        file.seek(0)
        file.write(len(text).to_bytes(8, "little") + text)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside ``target``. Raises StorageError if the disk fails in the block."""
    try:
        with temporary_folder(target) as folder:
            yield folder
    except OSError as error:
        raise StorageError(f"{target}: could not be written: {error.strerror or error}") from error


def earlier_files(target: Path) -> list[Path]:
    """Return the files that a new set of this name replaces, whatever their number of shards; indices first."""
    if not target.parent.is_dir():
        return []
    pattern = re.compile(
        rf"{re.escape(target.name)}"
        rf"(\d*({re.escape(INDEX_EXTENSION)})?|{re.escape(METADATA_EXTENSION)})"
    )
    files = [path for path in target.parent.iterdir() if path.is_file() and pattern.fullmatch(path.name)]
    return sorted(files, key=lambda path: (path.suffix != INDEX_EXTENSION, path.name))

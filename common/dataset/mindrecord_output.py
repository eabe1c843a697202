"""Corpora as sets of MindRecord files, which MindSpore's FileWriter writes one by one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from common.dataset.metadata import METADATA_EXTENSION
from common.dataset.mindrecord import EXTENSION
from common.dataset.mindrecord_file import INDEX_EXTENSION
from common.dataset.options import DEFAULT_SEQ_LENGTH, PreprocessOptions
from common.dataset.preprocess import Progress, preprocess
from common.dataset.samples import GPTDataset
from common.dataset.token_files import with_extension
from common.errors import ConfigError, DataError, StorageError
from common.files import fsync_folder, temporary_folder
from common.interrupts import holding_signals
from common.paths import install
from common.structured_files import parse_json


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
    with _temporary_folder(target) as folder:
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
        if len(text) + 8 > header["header_size"]:
            raise DataError(f"{path}: a set of {len(names)} shards does not fit its header; write fewer shards")
        file.seek(0)
        file.write(len(text).to_bytes(8, "little") + text)


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
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


def preprocess_mindrecord(
    options: PreprocessOptions, on_progress: Callable[[Progress], None]
) -> tuple[list[Any], Progress]:
    """Write a set of files for each key, as ``preprocess`` writes pairs. Returns a ``WrittenMindRecord`` of
    mindformers_gpt2 for each.

    Raises ConfigError too if MindSpore, which writes the files, is not installed.
    """
    os.environ.setdefault("GLOG_v", "3")  # MindSpore warns of absent devices
    try:
        writer = import_module("mindformers_gpt2.mindrecord")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mindspore":
            raise
        raise ConfigError(
            "--format mindrecord is written by MindSpore, which is not installed; install it with:"
            f" {install('mindspore')}, or leave the option out: both backends train from"
            " .bin/.idx pairs too"
        ) from None
    prefix, seq_length, shards = (
        options.output_prefix,
        options.seq_length or DEFAULT_SEQ_LENGTH,
        options.num_splits or 1,
    )
    writer.check_mindrecord(prefix, shards)
    for key in {*options.json_keys, "text"}:  # plain text has only this key, whatever was asked for
        options.keep_inputs(earlier_files(with_extension(options.prefix_of(key), EXTENSION)))
    with _temporary_folder(prefix.with_name(f"{prefix.name}.pairs")) as folder:
        pairs = replace(options, format="indexed", seq_length=None, num_splits=None, output_prefix=folder / prefix.name)
        progress = preprocess(pairs, on_progress)
        for pair in progress.prefixes:  # check all, before the first set is written
            GPTDataset(pair, split="train", split_weights=(1, 0, 0), seq_length=seq_length, seed=0, shuffle=False)
        sets = [
            writer.write_mindrecord(pair, prefix.with_name(f"{pair.name}{EXTENSION}"), seq_length, shards)
            for pair in progress.prefixes
        ]
        return sets, progress

"""Write token files as MindRecord, by MindSpore's own FileWriter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from mindspore.mindrecord import FileWriter

from common.dataset.metadata import METADATA_EXTENSION, read_metadata, write_metadata
from common.dataset.mindrecord import publication
from common.dataset.mindrecord_file import COLUMN, MindRecordFile
from common.dataset.samples import GPTDataset
from common.dataset.token_files import with_extension
from common.errors import ConfigError, DataError, GPT2Error, StorageError

_SCHEMA = {COLUMN: {"type": "int32", "shape": [-1]}}
# Tokens in one call, 4 MB at most. FileWriter checks for 10 MB of free disk before each call, and
# crashes if a call needs more.
_CHUNK_TOKENS = 1 << 20
_MAX_SHARDS = 1000  # FileWriter's limit
_FORBIDDEN = set("\\:*?\"<>|`&';")  # FileWriter's


def check_mindrecord(target: Path, shards: int) -> None:
    """Raise ConfigError for a name or a number of files that FileWriter would reject."""
    if not 1 <= shards <= _MAX_SHARDS:
        raise ConfigError(f"--num-splits={shards}: expected 1 to {_MAX_SHARDS}")
    if _FORBIDDEN & set(target.name):
        raise ConfigError(
            f"{target.name}: MindRecord names hold none of {' '.join(sorted(_FORBIDDEN))}; choose"
            " another --output-prefix"
        )


def write_mindrecord(prefix: Path, target: Path, seq_length: int, shards: int = 1) -> str:
    """Write the windows of a .bin/.idx pair in file order, as rows ``input_ids`` of seq_length + 1 tokens.

    Neighbours share one token. target: the name for FileWriter. Its folder is created if absent, and an older set of
    this name is replaced. After a failure nothing appears under it. shards: files of consecutive rows, as equal as
    possible. Memory does not grow with the data. Returns what was written, in words.
    Raises DataError (too few tokens), ConfigError (shards, name), StorageError (output).
    """
    check_mindrecord(target, shards)
    windows = GPTDataset(prefix, split="train", split_weights=(1, 0, 0), seq_length=seq_length, seed=0, shuffle=False)
    rows = windows.samples_per_epoch
    if shards > rows:
        raise DataError(
            f"{prefix}: gives {rows} rows of {seq_length + 1} tokens, too few for {shards} files;"
            " ask for fewer --num-splits"
        )
    with publication(target, shards) as paths:
        for number, path in enumerate(paths):
            _write_file(path, windows, rows * number // shards, rows * (number + 1) // shards)
        metadata = read_metadata(with_extension(windows.data.prefix, METADATA_EXTENSION))
        if metadata is not None:
            options = metadata.options | {"format": "mindrecord", "seq_length": str(seq_length)}
            metadata = replace(metadata, tokens=rows * seq_length + 1, options=options)
            write_metadata(with_extension(paths[0].with_name(target.name), METADATA_EXTENSION), metadata)
    names = str(target.with_name(paths[0].name)) + (f" ... {paths[-1].name}" if shards > 1 else "")
    left_over = windows.token_count - rows * seq_length - 1
    return f"{names}: {rows} rows of {seq_length + 1} tokens, {left_over} tokens left over at the end"


def _write_file(path: Path, windows: GPTDataset, first: int, end: int) -> None:
    """Write rows first ... end - 1, read them back and compare.

    FileWriter drops rows that it rejects with only a warning.
    """
    step = max(1, _CHUNK_TOKENS // (windows.seq_length + 1))
    chunks = [np.arange(start, min(start + step, end)) for start in range(first, end, step)]
    try:
        writer = FileWriter(str(path), shard_num=1, overwrite=True)
        writer.add_schema(_SCHEMA, "token ids")
        for ids in chunks:
            writer.write_raw_data([{COLUMN: row} for row in windows.read(ids)])
        writer.commit()
        written = MindRecordFile(path)
        same = len(written) == end - first and all(
            (written.read(ids - first) == windows.read(ids)).all() for ids in chunks
        )
    except DataError as error:
        raise StorageError(f"{path.name}: was not written whole ({error}); is the disk full?") from error
    except GPT2Error:  # such as a signal
        raise
    except Exception as error:  # FileWriter raises RuntimeError and its own exceptions, with several lines
        lines = [line for line in str(error).splitlines() if line.startswith("[ERROR]")] or [repr(error)]
        raise StorageError(f"{path.name}: MindSpore could not write it: {lines[0]}; is the disk full?") from error
    if not same:
        raise StorageError(f"{path.name}: reads back other rows than were written; the disk may be full or failing")

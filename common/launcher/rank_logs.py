"""Log files of a rank: output in mf_parallel{rank}/mindformer.log, start settings in env.log.

They are only appended to.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from common.errors import ConfigError
from common.launcher.process_spec import ProcessSpec

_WRITTEN = re.compile(
    r"(?!\w*(TOKEN|SECRET|PASS|_KEY))"
    r"(RANK|LOCAL_|WORLD_SIZE|NODE_|GROUP_|MASTER_|TORCH|PYTORCH_|CUDA_|CUBLAS_|NCCL_|GLOO_|OMP_"
    r"|MKL_|KMP_|OPENBLAS_|MS_|HCCL_|HCCN_|ASCEND_|NPU_|TE_|TASK_QUEUE_|CPU_AFFINITY_|GLOG_|GPT2_"
    r"|HOROVOD_|SLURM_(?!JWT)|OMPI_|PET_|MA_|VC_|DEVICE_|LD_|PYTHON|VIRTUAL_ENV|CONDA_)\w*"
    r"|PATH|HOME|PWD|USER|HOSTNAME|LANG|LC_\w+|TMPDIR"
)
"""Variables that env.log shows. Others may hold secrets, and do not steer a run."""
_MOST_COPIED = 1 << 20
"""Most bytes copied to the terminal at once; longer text is cut to its end."""
_TAIL_BYTES, _TAIL_LINES, _LINE_LENGTH = 16384, 20, 300


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """Log file, open for appending. start: its length before this run."""

    path: Path
    file: IO[bytes]
    start: int


def open_log(folder: Path, child: ProcessSpec) -> RankLog:
    """Create the child's folder and open its log. Raises ConfigError if the folder cannot be
    written.
    """
    path = folder / child.log_folder / "mindformer.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _open_private(path.with_name("env.log")).close()
        file = _append(path)
    except OSError as error:
        raise ConfigError(
            f"log folder {path.parent}: cannot be written: {error.strerror or error}; choose"
            " another one by --log_dir"
        ) from None
    if child.log_link:
        _link(folder / child.log_link, path)
    return RankLog(path=path, file=file, start=file.tell())


def set_aside(folder: Path, child: ProcessSpec) -> Path | None:
    """Rename the log of an earlier attempt to the first free ``mindformer.log.N``.

    Returns its new name, or None if there is no log or the disk does not allow it.
    """
    path = folder / child.log_folder / "mindformer.log"
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with suppress(OSError):
        path.rename(target)
        return target
    return None


def write_headers(log: RankLog, child: ProcessSpec, environment: Mapping[str, str]) -> RankLog:
    """Begin this run's part of both files, and return the log as it is then.

    A full disk does not prevent the start.
    """
    header = f"==== {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {child}\n"
    shown = sorted(name for name in environment if _WRITTEN.fullmatch(name))
    lines = [f"{name}={environment[name]}" for name in shown]
    with suppress(OSError):
        log.file.write(header.encode())
        text = header + "".join(
            line.replace("\n", "\\n") + "\n" for line in [f"# {shlex.join(child.command)}", *lines]
        )
        with _open_private(log.path.with_name("env.log")) as file:
            file.write(text.encode(errors="replace"))
    return replace(log, start=log.file.tell())


def _link(name: Path, path: Path) -> None:
    """Link ``name`` to a log. An existing file of this name stays; a disk without links gets
    none.
    """
    with suppress(OSError):
        if name.is_symlink():
            name.unlink()
        name.symlink_to(path.relative_to(name.parent))


def _append(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Open a file for appending. A pipe without a reader is an error, not a wait. Raises
    OSError.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, mode)
    os.set_blocking(file, True)
    return os.fdopen(file, "ab", buffering=0)


def _open_private(path: Path) -> IO[bytes]:
    """Open a file for appending that only its owner can read, even if it exists already.

    Raises OSError.
    """
    file = _append(path, 0o600)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        with suppress(OSError):  # another user's file may still be writable
            os.fchmod(file.fileno(), 0o600)
    return file


def last_lines(log: RankLog) -> list[str]:
    """Return the last lines of this run, cut to a size for a terminal and a message."""
    text = read_new(log, max(log.start, _size(log) - _TAIL_BYTES))[0]
    # a progress bar is cut to its last state
    lines = [line.rpartition("\r")[2] or line for line in text.replace("\r\n", "\n").split("\n")]
    return [line.strip("\r")[:_LINE_LENGTH] for line in lines if line.strip()][-_TAIL_LINES:]


def both_ends(log: RankLog, most: int = 1 << 18) -> str:
    """Return the text of this run; of a long one ``most`` bytes at its start and at its end."""
    start, offset = read_new(log, log.start, most)
    return start + read_new(log, max(offset, _size(log) - most), most)[0]


def read_new(log: RankLog, offset: int, limit: int = 1 << 20) -> tuple[str, int]:
    """Return the text from ``offset`` on and the offset after it.

    Nothing is returned if the file cannot be read. An incomplete character waits for the next call.
    """
    with suppress(OSError), log.path.open("rb") as file:
        file.seek(offset)
        data = file.read(limit)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        return text, offset + len(data) - len(decoder.getstate()[0])
    return "", offset


def read_to_end(log: RankLog, offset: int) -> tuple[str, int]:
    """Read like read_new up to the end of the file.

    Of a long text only the last part is returned, with the number of bytes left out.
    """
    behind = _size(log) - offset
    if behind <= _MOST_COPIED:
        return read_new(log, offset, _MOST_COPIED)
    skipped = behind - _TAIL_BYTES
    text, end = read_new(log, offset + skipped, _MOST_COPIED)
    return (
        f"\n[{skipped} bytes are left out here; the whole is in"
        f" {log.path}]\n{text.partition(chr(10))[2] or text}",
        end,
    )


def _size(log: RankLog) -> int:
    with suppress(OSError):
        return log.path.stat().st_size
    return 0

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from common.errors import ConfigError

SHOWN_VARIABLES = re.compile(
    r"(?!\w*(TOKEN|SECRET|PASS|_KEY))"
    r"(RANK|LOCAL_|WORLD_SIZE|NODE_|GROUP_|MASTER_|TORCH|PYTORCH_|CUDA_|CUBLAS_|NCCL_|GLOO_|OMP_"
    r"|MKL_|KMP_|OPENBLAS_|MS_|HCCL_|HCCN_|ASCEND_|NPU_|TE_|TASK_QUEUE_|CPU_AFFINITY_|GLOG_|GPT2_"
    r"|HOROVOD_|SLURM_(?!JWT)|OMPI_|PET_|MA_|VC_|DEVICE_|LD_|PYTHON|VIRTUAL_ENV|CONDA_)\w*"
    r"|PATH|HOME|PWD|USER|HOSTNAME|LANG|LC_\w+|TMPDIR"
)
"""Variables that env.log shows. Others may hold secrets, and do not steer a run."""
_TAIL_BYTES, _TAIL_LINES, _LINE_LENGTH = 16384, 20, 300


class RankLog:
    """Log of one process, open for appending."""

    def __init__(self, path: Path, link: Path | None = None) -> None:
        """Create the folder and open the file. link: another name of it.

        Raises ConfigError if the folder cannot be written.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _open_private(path.with_name("env.log")).close()
            self.file = _append(path)
        except OSError as error:
            raise ConfigError(
                f"log folder {path.parent}: cannot be written: {error.strerror or error}; choose"
                " another one by --log_dir"
            ) from None
        self.start = self._shown = self.file.tell()
        """Length before this run, and the part of it that ``new_output`` has returned."""
        if link is not None:
            with suppress(OSError):  # another program's file stays; a disk without links gets none
                if link.is_symlink():
                    link.unlink()
                link.symlink_to(path.relative_to(link.parent))

    def begin(self, title: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Begin this run's part of both files. A full disk does not prevent the start."""
        header = f"==== {time.strftime('%Y-%m-%dT%H:%M:%S%z')} {title}\n"
        shown = sorted(name for name in environment if SHOWN_VARIABLES.fullmatch(name))
        lines = [f"# {shlex.join(command)}", *(f"{name}={environment[name]}" for name in shown)]
        with suppress(OSError):
            self.file.write(header.encode())
            text = header + "".join(line.replace("\n", "\\n") + "\n" for line in lines)
            with _open_private(self.path.with_name("env.log")) as file:
                file.write(text.encode(errors="replace"))
        self.start = self._shown = self.file.tell()

    def new_output(self) -> str:
        """Return the text since the last call, of which the rest comes with the next."""
        text, self._shown = self.read(self._shown)
        return text

    def last_lines(self) -> list[str]:
        """Return the last lines of this run, cut to a size for a terminal and a message."""
        text = self.read(max(self.start, self._size() - _TAIL_BYTES))[0]
        # a progress bar is cut to its last state
        lines = [
            line.rpartition("\r")[2] or line for line in text.replace("\r\n", "\n").split("\n")
        ]
        found = [line.strip("\r")[:_LINE_LENGTH] for line in lines if line.strip()]
        return found[-_TAIL_LINES:] or ["(nothing)"]

    def both_ends(self, most: int = 1 << 18) -> str:
        """Return the text of this run; of a long one ``most`` bytes at its start and its end."""
        start, offset = self.read(self.start, most)
        return start + self.read(max(offset, self._size() - most), most)[0]

    def read(self, offset: int, limit: int = 1 << 20) -> tuple[str, int]:
        """Return the text from ``offset`` on and the offset after it.

        Nothing is returned if the file cannot be read. An incomplete character waits for the next
        call.
        """
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(offset)
            data = file.read(limit)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            text = decoder.decode(data)
            return text, offset + len(data) - len(decoder.getstate()[0])
        return "", offset

    def _size(self) -> int:
        with suppress(OSError):
            return self.path.stat().st_size
        return 0


def set_aside(path: Path) -> Path | None:
    """Rename the log of an earlier attempt to the first free ``mindformer.log.N``.

    Returns its new name, or None if there is no log or the disk does not allow it.
    """
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with suppress(OSError):
        path.rename(target)
        return target
    return None


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

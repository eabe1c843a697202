"""One process of a job: its logs, its heartbeat as it arrives here, and how it ended.

Output is in mf_parallel{rank}/mindformer.log, start settings in env.log. Both are only appended to.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import psutil

from common.cluster.rank_environment import FOREIGN
from common.errors import ConfigError
from common.processes.heartbeat import ALIVE, ALIVE_SECONDS
from common.processes.process_tree import Descendants
from common.whole_numbers import whole_number

DOING_ORDER = ("reading data", "computing")
"""Activities of a rank within a step, in order. Validating and saving come after, in any order."""
_STOPPED = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "t"}
"""States of a process stopped by a signal or a debugger, and the letters of ps for them."""
_SILENT_SECONDS = 5 * ALIVE_SECONDS
SHOWN_VARIABLES = re.compile(
    r"(?!\w*(TOKEN|SECRET|PASS|_KEY))"
    r"(RANK|LOCAL_|WORLD_SIZE|NODE_|GROUP_|MASTER_|TORCH|PYTORCH_|CUDA_|CUBLAS_|NCCL_|GLOO_|OMP_"
    r"|MKL_|KMP_|OPENBLAS_|MS_|HCCL_|HCCN_|ASCEND_|NPU_|TE_|TASK_QUEUE_|CPU_AFFINITY_|GLOG_|GPT2_"
    r"|HOROVOD_|SLURM_(?!JWT)|OMPI_|PET_|MA_|VC_|DEVICE_|LD_|PYTHON|VIRTUAL_ENV|CONDA_)\w*"
    r"|PATH|HOME|PWD|USER|HOSTNAME|LANG|LC_\w+|TMPDIR"
)
"""Variables that env.log shows. Others may hold secrets, and do not steer a run."""
_TAIL_BYTES, _TAIL_LINES, _LINE_LENGTH = 16384, 20, 300


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start. environment: added to the variables of this process.

    cores: those to pin it to; empty for none. name: set for a helper beside the ranks, such as MindSpore's scheduler,
    which sends no heartbeat and is ended after the ranks. folder: of its logs, within the job's. title: its name in
    messages; empty for ``rank 3`` or its name. log_link: another name of its log, in the job's folder.
    """

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    name: str = ""
    folder: str = ""
    title: str = ""
    log_link: str = ""

    def __str__(self) -> str:
        return self.title or self.name or f"rank {self.rank}"

    @property
    def log_folder(self) -> str:
        return self.folder or f"mf_parallel{f'_{self.name}' if self.name else self.rank}"

    @property
    def log(self) -> Path:
        """Its log, within the job's folder."""
        return Path(self.log_folder) / "mindformer.log"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One running rank. name: the rank and its host. log: path on its host."""

    rank: int
    name: str
    log: str
    step: int = -1
    """Last step reported; -1 if none."""
    doing: str = "starting"
    idle: float = 0.0
    """Seconds since its step or activity last changed or was reported again."""
    silent: float | None = None
    """Seconds since its last sign of life; None if there was none yet."""
    process_state: str = ""
    """State as psutil names it, such as "stopped"; empty if it has ended."""

    def in_words(self) -> str:
        where = "it has not reached its first step"
        if self.step >= 0:
            where = f"its last report was step {self.step}, {self.doing}"
        why = ""
        if self.is_stopped:
            why = f"; its process is stopped (state {_STOPPED[self.process_state]})"
        elif self.process_state == psutil.STATUS_DISK_SLEEP:
            why = "; its process waits for a disk or a driver (state D)"
        elif self.is_silent:
            why = f"; its process has given no sign of life for {self.silent:.0f} s"
        return f"{self.name} has made no progress for {self.idle:.0f} s: {where}{why}; its log: {self.log}"

    @property
    def is_stopped(self) -> bool:
        return self.process_state in _STOPPED

    @property
    def is_silent(self) -> bool:
        return self.silent is not None and self.silent > _SILENT_SECONDS

    @property
    def position(self) -> tuple[int, int]:
        """Place within the run, to compare with that of other ranks."""
        order = DOING_ORDER.index(self.doing) if self.doing in DOING_ORDER else len(DOING_ORDER)
        return self.step, order


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of ranks. certain: not the consequence of another failure.

    ranks: those whose logs tell more. stalled: they may still run. lost_host: one was lost or did not come.
    """

    text: str
    code: int
    certain: bool = True
    ranks: list[int] = field(default_factory=list)
    stalled: bool = False
    lost_host: bool = False


def stalled_ranks(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that the others wait for: the stopped, else the silent, else the last."""
    stopped = [state for state in states if state.is_stopped] or [state for state in states if state.is_silent]
    first = min(state.position for state in states)
    return stopped or [state for state in states if state.position == first]


class RankLog:
    """Log of one process, open for appending."""

    def __init__(self, path: Path, link: Path | None = None) -> None:
        """link: another name of the file. Raises ConfigError if the folder cannot be written."""
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
        # a log that was emptied meanwhile begins anew
        text, self._shown = self.read(self._shown if self._shown <= self._size() else 0)
        return text

    def last_lines(self) -> list[str]:
        """Return the last lines of this run, cut to a size for a terminal and a message."""
        text = self.read(max(self.start, self._size() - _TAIL_BYTES))[0]
        # a progress bar is cut to its last state
        lines = [line.rpartition("\r")[2] or line for line in text.replace("\r\n", "\n").split("\n")]
        found = [line.strip("\r")[:_LINE_LENGTH] for line in lines if line.strip()]
        return found[-_TAIL_LINES:] or ["(nothing)"]

    def both_ends(self, most: int = 1 << 18) -> str:
        """Return the text of this run; of a long one ``most`` bytes at its start and its end."""
        start, offset = self.read(self.start, most)
        return start + self.read(max(offset, self._size() - most), most)[0]

    def read(self, offset: int, limit: int = 1 << 20) -> tuple[str, int]:
        """Return the text from ``offset`` on and the offset after it.

        Nothing is returned if the file cannot be read. An incomplete character waits for the next call.
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
    """Rename a log to the first free ``mindformer.log.N``, and return that if it was possible."""
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    with suppress(OSError):
        path.rename(target)
        return target
    return None


def _append(path: Path, mode: int = 0o666) -> IO[bytes]:
    """Open a file for appending. A pipe without a reader is an error, not a wait."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, mode)
    os.set_blocking(file, True)
    return os.fdopen(file, "ab", buffering=0)


def _open_private(path: Path) -> IO[bytes]:
    """Open a file for appending that only its owner can read, even if it exists already."""
    file = _append(path, 0o600)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        with suppress(OSError):  # another user's file may still be writable
            os.fchmod(file.fileno(), 0o600)
    return file


class RankProcess:
    """Process of a job, with an open log. host: name of this one; empty if it is the only one.

    Raises ConfigError if the log cannot be written.
    """

    def __init__(self, spec: ProcessSpec, log_folder: Path, host: str) -> None:
        self.spec = spec
        self.log = RankLog(log_folder / spec.log, log_folder / spec.log_link if spec.log_link else None)
        device = "" if spec.name else spec.environment.get("DEVICE_ID")
        where = [word for word in (device and f"device {device}", host) if word]
        self.name = str(spec) + (f" ({', '.join(where)})" if where else "")
        self.code: int | None = None
        """Exit code once it has ended, -n for signal n."""
        self.first_step = -1
        """First step reported; -1 if none."""
        self._told = RankState(rank=spec.rank, name=self.name, log=str(self.log.path))
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._rest = b""
        self._moved = 0.0
        self._heard: float | None = None

    @property
    def runs(self) -> bool:
        """Tell whether it is a rank that has been started and has not ended."""
        return self._process is not None and self.code is None and not self.spec.name

    @property
    def last_step(self) -> int:
        """Last step reported; -1 if none."""
        return self._told.step

    def start(self, descendants: Descendants, variables: Mapping[str, str]) -> int:
        """Start it with a heartbeat, and return the number of the process. Raises OSError.

        Call it from a thread that stays alive: the kernel uses the end of the starting thread as
        the end of this process.
        """
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        environment = {
            "PYTHONUNBUFFERED": "1",  # so that a killed rank's last lines are in its log
            **{name: value for name, value in os.environ.items() if name not in FOREIGN},
            **self.spec.environment,
            **variables,
            "GPT2_LAUNCHER_PID": str(os.getpid()),
            "GPT2_HEARTBEAT_FD": str(writing),
        }
        try:
            self.log.begin(str(self.spec), self.spec.command, environment)
            with self.log.file as file:
                self._process = descendants.start(
                    self.spec.command, cores=self.spec.cores, env=environment, stdout=file, pass_fds=(writing,)
                )
        finally:
            os.close(writing)
        self._moved = time.monotonic()
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, but not to its children."""
        # not reaped, so the number is still its own
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def read_heartbeat(self, now: float) -> None:
        """Process the reports since the last call. now: seconds of time.monotonic()."""
        with suppress(BlockingIOError):
            while self._pipe >= 0 and (chunk := os.read(self._pipe, 65536)):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace"), now)

    def _take(self, line: str, now: float) -> None:
        self._heard = now
        step, _, doing = line.partition(" ")
        number = whole_number(step)
        if line != ALIVE and number is not None:
            self._told, self._moved = replace(self._told, step=number, doing=doing), now
            if self.first_step < 0:
                self.first_step = number

    def state(self, now: float) -> RankState:
        state = ""
        with suppress(psutil.Error):
            if self._process is not None:
                state = str(psutil.Process(self._process.pid).status())
        silent = None if self._heard is None else now - self._heard
        return replace(self._told, idle=now - self._moved, silent=silent, process_state=state)

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        self._pipe = -1

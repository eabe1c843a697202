"""Processes of a launcher: started each in a session of its own, waited for, and ended with everything they started. Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # <linux/prctl.h>
_HINTS = {
    signal.SIGKILL: "often the kernel, out of memory: see dmesg",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "often a full /dev/shm or a file that shrank",
}


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start. environment: added to the launcher's own. cores: to pin it to; empty: not pinned.

    name: set for a helper beside the ranks, such as MindSpore's scheduler: it sends no heartbeat, and it is ended after the ranks.
    folder: of its logs, in the job's. title: what messages call it; empty: ``rank 3``, or its name.
    """

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] = ()
    name: str = ""
    folder: str = ""
    title: str = ""

    def __str__(self) -> str:
        return self.title or self.name or f"rank {self.rank}"

    @property
    def log_folder(self) -> str:
        return self.folder or f"mf_parallel{f'_{self.name}' if self.name else self.rank}"


def start(child: ProcessSpec, environment: Mapping[str, str], log: IO[bytes], pipe: int) -> subprocess.Popen[bytes]:
    """Start it with output to ``log``, nothing to read, and ``pipe`` as only further file. Raises OSError.

    Call it from a thread that lives on: the kernel takes the end of the starting thread for the launcher's.
    """
    with _pinned(child.cores):
        return subprocess.Popen(  # noqa: S603 - no shell
            child.command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(pipe,),
        )


@contextmanager
def _pinned(cores: tuple[int, ...]) -> Iterator[None]:
    """A process inherits the cores of the thread that starts it, before it starts threads of its own."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # a core that has gone meanwhile: better unpinned than not at all
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def watch(pid: int, ended: Callable[[int], None]) -> None:
    """Call ``ended`` with the exit code, -n for signal n, when the process ends. It stays a zombie, so that its number stays its own."""

    def wait() -> None:
        try:
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            result = None
        if result is None:
            ended(1)
        else:
            ended(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    threading.Thread(target=wait, name=f"wait for {pid}", daemon=True).start()


def in_words(code: int) -> str:
    """An exit code, -n for signal n, as a sentence without its subject."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = next((hint for number, hint in _HINTS.items() if number == -code), "")
    return f"was killed by signal {-code} ({signal_name(-code)}{f'; {hint}' if hint else ''})"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def guard() -> Iterator[Callable[[int], None]]:
    """Within it, the process groups that are handed to the function are killed when this process dies, by whatever. See guard.py."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
    with subprocess.Popen(  # noqa: S603 - no shell
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0
    ) as process:
        pipe = process.stdin
        assert pipe is not None

        def tell(group: int) -> None:
            with suppress(OSError):  # it was killed: then there is none
                pipe.write(f"{group}\n".encode())

        try:
            yield tell
        finally:
            process.kill()  # before the pipe is closed


@contextmanager
def adopted_orphans() -> Iterator[Collection[int]]:
    """Within it, a process whose parent dies becomes this one's child, and is found by ``living``. Gives the children of before."""
    before = {pid for pid, (parent, _) in _processes().items() if parent == os.getpid()}
    if sys.platform != "linux":
        yield before
        return
    library = ctypes.CDLL(None)
    old = ctypes.c_int(0)
    library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(old), 0, 0, 0)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield before
    finally:
        library.prctl(_PR_SET_CHILD_SUBREAPER, old.value, 0, 0, 0)


def living(before: Collection[int]) -> list[int]:
    """This process's descendants that have not ended, but for those below the children ``before``."""
    table = _processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found = [pid for pid in children.get(os.getpid(), []) if pid not in before]
    for pid in found:  # grows as it is read
        found += children.get(pid, [])
    return [pid for pid in found if table[pid][1] not in "ZX"]


def end_all(groups: Collection[int], before: Collection[int], limit: float) -> list[int]:
    """SIGKILL to the groups and to every process of ``living``, until none is left. Returns those still there after ``limit`` seconds."""
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + limit
    while (left := living(before)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def reap(before: Collection[int]) -> None:
    """Take the exit codes of adopted processes that have ended."""
    for pid, (parent, state) in _processes().items():
        if parent == os.getpid() and pid not in before and state == "Z":
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _processes() -> dict[int, tuple[int, str]]:
    """Number -> (number of the parent, state letter) of every process that /proc shows."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            found[int(entry.name)] = (int(parent), state)
    return found

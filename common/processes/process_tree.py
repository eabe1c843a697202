"""Descendants of this process (Linux): started, watched and ended, even without a parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import psutil

from common.errors import signal_name

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # <linux/prctl.h>
_HINTS = {
    signal.SIGKILL: "often the kernel, out of memory: see dmesg",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "often a full /dev/shm or a file that shrank",
}


_GUARD = """
import os, signal, sys
for group in [int(line) for line in sys.stdin]:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
"""Program that outlives a killed launcher: it reads numbers of process groups until the pipe is
closed, and kills the groups.
"""


class Descendants:
    """Processes that this one starts, and whatever they start. As a context manager, it leaves
    none.

    Within it, orphaned descendants become children of this process, so that they are found. When
    this process dies for any reason, a guard ends the started ones.
    """

    def __init__(self, limit: float) -> None:
        """limit: seconds that they may take to end after SIGKILL."""
        self._limit = limit
        self._started: list[subprocess.Popen[bytes]] = []
        self.undead: list[int] = []
        """Processes that did not end after SIGKILL, known after the context."""

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(  # noqa: S603 - no shell
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        self._before = {pid for pid, (parent, _) in _processes().items() if parent == os.getpid()}
        self._adopts = _adopt_orphans(1)
        return self

    def start(
        self, command: Sequence[str], *, cores: Sequence[int] = (), **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own, with empty input. Raises OSError.

        cores: those to pin it to; empty for none. options: as of ``Popen``.
        """
        with _pinned(cores):
            process = subprocess.Popen(  # noqa: S603 - no shell
                command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )
        self._started.append(process)
        assert self._guard.stdin is not None
        with suppress(OSError):  # the guard was killed
            self._guard.stdin.write(f"{process.pid}\n".encode())
        return process

    def living(self) -> list[int]:
        """Return the descendants that have not ended, except those below children from before."""
        table = _processes()
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in table.items():
            children.setdefault(parent, []).append(pid)
        found = [pid for pid in children.get(os.getpid(), []) if pid not in self._before]
        for pid in found:  # grows while it is read
            found += children.get(pid, [])
        ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return [pid for pid in found if table[pid][1] not in ended]

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            _kill(os.killpg, process.pid)
        deadline = time.monotonic() + self._limit
        while (left := self.living()) and time.monotonic() < deadline:
            for pid in left:
                _kill(os.kill, pid)
            time.sleep(0.02)
        self.undead = left
        for process in self._started:
            process.poll()
        for pid, (parent, state) in _processes().items():
            is_new = parent == os.getpid() and pid not in self._before
            if is_new and state == psutil.STATUS_ZOMBIE:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        _adopt_orphans(self._adopts)
        self._guard.kill()  # before the pipe is closed
        self._guard.communicate()


def watch(pid: int, ended: Callable[[int], None]) -> None:
    """Call ``ended`` with the exit code (-n for signal n) when a child ends.

    The child stays a zombie, so that its number is not reused.
    """

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
    """Return an exit code, -n for signal n, as a sentence without its subject."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = next((hint for number, hint in _HINTS.items() if number == -code), "")
    return f"was killed by signal {-code} ({signal_name(-code)}{f'; {hint}' if hint else ''})"


def _kill(send: Callable[[int, int], None], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        send(number, signal.SIGKILL)


def _adopt_orphans(wanted: int) -> int:
    """Let orphaned descendants become children of this process (1) or not (0); return what was."""
    old = ctypes.c_int(0)
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(old), 0, 0, 0)
        library.prctl(_PR_SET_CHILD_SUBREAPER, wanted, 0, 0, 0)
    return old.value


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Let processes started within this context inherit these cores before they start threads."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # a core is no longer available: unpinned is better than not started
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _processes() -> dict[int, tuple[int, str]]:
    """Map the number of every readable process to the number of its parent and its state.

    psutil's own ``children`` fails where /proc hides the processes of other users. Its
    ``process_iter`` remembers numbers that other processes have taken since.
    """
    found = {}
    for pid in psutil.pids():
        with suppress(psutil.Error):  # it has ended meanwhile, or is hidden
            process = psutil.Process(pid)
            with process.oneshot():
                found[pid] = (process.ppid(), process.status())
    return found

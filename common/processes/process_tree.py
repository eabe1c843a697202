"""Descendants of this process: found, watched and ended, even after their parent has died
(Linux).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from common.errors import signal_name

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # <linux/prctl.h>
_HINTS = {
    signal.SIGKILL: "often the kernel, out of memory: see dmesg",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "often a full /dev/shm or a file that shrank",
}


def process_state(pid: int) -> str:
    """Return the state of a process as psutil names it, such as "stopped"; empty if it has
    ended.
    """
    with suppress(psutil.Error):
        return str(psutil.Process(pid).status())
    return ""


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


@contextmanager
def orphan_guard() -> Iterator[Callable[[int], None]]:
    """Yield a function that registers process groups to be killed when this process dies for any
    reason.

    See orphan_guard.py.
    """
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("orphan_guard.py"))]
    with subprocess.Popen(  # noqa: S603 - no shell
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    ) as process:
        pipe = process.stdin
        assert pipe is not None

        def tell(group: int) -> None:
            with suppress(OSError):  # the guard was killed
                pipe.write(f"{group}\n".encode())

        try:
            yield tell
        finally:
            process.kill()  # before the pipe is closed


@contextmanager
def adopted_orphans() -> Iterator[Collection[int]]:
    """Make orphaned descendants children of this process, so that ``living`` finds them.

    Yields the children that existed before.
    """
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
    """Return the descendants that have not ended, except those below the children ``before``."""
    table = _processes()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found = [pid for pid in children.get(os.getpid(), []) if pid not in before]
    for pid in found:  # grows while it is read
        found += children.get(pid, [])
    return [pid for pid in found if table[pid][1] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)]


def end_all(groups: Collection[int], before: Collection[int], limit: float) -> list[int]:
    """Send SIGKILL to the groups and to every process of ``living``, until none is left.

    Returns those that are still there after ``limit`` seconds.
    """
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
    """Collect the exit codes of adopted processes that have ended."""
    for pid, (parent, state) in _processes().items():
        if parent == os.getpid() and pid not in before and state == psutil.STATUS_ZOMBIE:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


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

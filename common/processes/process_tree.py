"""Processes that this one starts (Linux): pinned, watched, and ended with all they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import psutil

from common.errors import signal_name
from common.processes.heartbeat import die_with_parent, prctl

_SYSTEM = Path("/sys/devices/system/cpu")
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
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
"""Program that outlives a killed launcher, and then kills the process groups that it was told."""


class Descendants:
    """Processes that this one starts, and whatever they start. As a context manager, it leaves none.

    Within it, orphaned descendants become children of this process, so that they are found. When this process dies for
    any reason, a guard ends the started ones.
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
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become children of this process
        return self

    def start(self, command: Sequence[str], *, cores: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own, with empty input. Raises OSError.

        cores: those to pin it to; empty for none. options: as of ``Popen``.
        """
        # without cores nothing is set: the kernel keeps a mask, also where a container gets more cores later
        before = os.sched_getaffinity(0) if cores else ()
        with suppress(OSError):  # of no cores, or of one that has gone: unpinned is better than not started
            os.sched_setaffinity(0, cores)  # inherited, so that its first threads are pinned too
        try:
            process = subprocess.Popen(  # noqa: S603 - no shell
                command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True, **options
            )
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, before)
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

    def wait(self, limit: float, *, kill: bool = False) -> list[int]:
        """Wait at most ``limit`` seconds until all have ended. Returns those that have not."""
        deadline = time.monotonic() + limit
        while (left := self.living()) and time.monotonic() < deadline:
            for pid in left if kill else ():
                _kill(os.kill, pid)
            time.sleep(0.02)
        return left

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            _kill(os.killpg, process.pid)
        self.undead = self.wait(self._limit, kill=True)
        for process in self._started:
            process.poll()
        for pid, (parent, _state) in _processes().items():
            if parent == os.getpid() and pid not in self._before:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
        self._guard.kill()  # before the pipe is closed
        self._guard.communicate()


def run_program(command: Sequence[str], limit: float) -> tuple[int | None, str, str]:
    """Run a program for at most ``limit`` seconds, and kill what is left of it.

    It also dies with this process, if its main thread calls. Returns exit code, standard output and
    standard error. The code is -n for signal n; None if it reached its limit or could not start.
    """
    try:
        child = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=tied(),
        )
    except OSError as reason:
        return None, "", f"{command[0]}: {reason.strerror or reason}"
    try:
        output, errors = child.communicate(timeout=limit)
        return child.returncode, output, errors
    except subprocess.TimeoutExpired:
        return None, "", f"no answer within {limit:g} s"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # state D lasts until the device releases it
            child.communicate(timeout=5)


def tied() -> Callable[[], None]:
    """Return a ``preexec_fn`` by which a child dies with the thread that starts it."""
    parent = os.getpid()
    return lambda: None if die_with_parent(parent) else os._exit(1)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def watch(pid: int, ended: Callable[..., None]) -> None:
    """Call ``ended(code=...)`` with the exit code (-n for signal n) when a child ends.

    The child stays a zombie, so that its number is not reused.
    """

    def wait() -> None:
        code = 1  # somebody else has taken it
        with suppress(ChildProcessError):
            if result := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT):
                has_exited = result.si_code == os.CLD_EXITED
                code = result.si_status if has_exited else -result.si_status
        ended(code=code)

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


def cores_of_ranks(ranks: int) -> list[tuple[int, ...]]:
    """Divide the cores of this process among ``ranks``; shares are empty if there are fewer cores.

    Neighbours share caches and memory, so cores are ordered by package, core and thread. They are then split into runs
    of equal length, the first ones longer by a core if the number does not divide.
    """
    return share(in_order(os.sched_getaffinity(0)), ranks)


def in_order(cores: Collection[int], system: Path = _SYSTEM) -> list[int]:
    """Sort by (package, core, thread) if ``system`` has them for every core, else by number."""
    numbers = sorted(cores)
    try:
        places = {
            number: [
                int((system / f"cpu{number}" / "topology" / name).read_text())
                for name in ("physical_package_id", "core_id")
            ]
            for number in numbers
        }
    except (OSError, ValueError):
        return numbers
    return sorted(numbers, key=lambda number: (places[number], number))


def share(cores: list[int], ranks: int) -> list[tuple[int, ...]]:
    """Split into ``ranks`` runs whose lengths differ by at most one."""
    if len(cores) < ranks:
        return [()] * ranks
    length, longer = divmod(len(cores), ranks)
    starts = [rank * length + min(rank, longer) for rank in range(ranks + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(starts)]


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

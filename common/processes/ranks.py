"""Ranks of this host as processes: start them, read their heartbeats, and end them."""

from __future__ import annotations

import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Self

from common.processes.heartbeat import DUMP_SIGNAL
from common.processes.monitor import Monitor
from common.processes.process_tree import (
    adopted_orphans,
    end_all,
    living,
    orphan_guard,
    reap,
    watch,
)

_KILL_SECONDS = 8.0
_LEAVE_SECONDS = 2.0
"""Seconds that helpers, and processes started by ranks, may outlive the ranks."""
_DUMP_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start. environment: added to the variables of this process.

    cores: those to pin it to; empty for none. name: set for a helper beside the ranks, such as
    MindSpore's scheduler, which sends no heartbeat and is ended after the ranks. folder: of its
    logs, within the job's. title: its name in messages; empty for ``rank 3`` or its name. log_link:
    another name of its log, in the job's folder.
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


class Ranks(ABC):
    """Processes by their index in ``specs``. As a context manager, it leaves none of them running.

    Within it, orphaned descendants become children of this process. When this process dies for any
    reason, they die too.
    """

    def __init__(self, specs: Collection[ProcessSpec]) -> None:
        self.specs = tuple(specs)
        self.monitors: dict[int, Monitor] = {}
        self.undead: list[int] = []
        """Processes that did not end after SIGKILL, known after the context."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._guard = stack.enter_context(orphan_guard())
            self._before = stack.enter_context(adopted_orphans())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            self.undead = end_all(self.pids().values(), self._before, _KILL_SECONDS)
            for process in self._processes.values():
                process.poll()
            for monitor in self.monitors.values():
                monitor.close()
            self.monitors.clear()
            reap(self._before)

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a process in messages."""

    @abstractmethod
    def log(self, index: int) -> Path: ...

    @abstractmethod
    def open_log(self, index: int, environment: Mapping[str, str]) -> IO[bytes]:
        """Open the file for its output. environment: the variables that it gets."""

    @abstractmethod
    def ended(self, index: int, code: int) -> None:
        """Handle its exit code, -n for signal n. Another thread calls it."""

    def start_one(self, index: int, *, without: Collection[str] = ()) -> None:
        """Start a process in its own session, with a heartbeat and empty input. Raises OSError.

        Call it from a thread that stays alive: the kernel uses the end of the starting thread as
        the end of this process. without: variables of this process that it does not get.
        """
        spec = self.specs[index]
        reading, writing = os.pipe()
        environment = {
            "PYTHONUNBUFFERED": "1",  # so that a killed rank's last lines are in its log
            **{key: value for key, value in os.environ.items() if key not in without},
            **spec.environment,
            "GPT2_LAUNCHER_PID": str(os.getpid()),
            "GPT2_HEARTBEAT_FD": str(writing),
        }
        try:
            with self.open_log(index, environment) as file, _pinned(spec.cores):
                process = subprocess.Popen(  # noqa: S603 - no shell
                    spec.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(writing,),
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._guard(process.pid)
        self._processes[index] = process
        self.monitors[index] = Monitor(
            rank=spec.rank,
            name=self.name(index),
            log=self.log(index),
            pid=process.pid,
            pipe=reading,
            now=time.monotonic(),
        )
        watch(process.pid, partial(self.ended, index))

    def pids(self) -> dict[int, int]:
        """Return the numbers of the started processes, by index."""
        return {index: process.pid for index, process in self._processes.items()}

    def send_signal(self, indices: Collection[int], number: int) -> None:
        """Send a signal to started processes, but not to their children."""
        for index in indices:
            with suppress(ProcessLookupError):
                # not reaped, so the number is still its own
                os.kill(self._processes[index].pid, number)

    def dump_stacks(self, indices: Collection[int]) -> None:
        """Make processes with a heartbeat write the stacks of their threads into their logs."""
        self.send_signal(indices, DUMP_SIGNAL)
        if indices:
            time.sleep(_DUMP_SECONDS)

    def wait_for_leavers(self) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while living(self._before) and time.monotonic() < deadline:
            time.sleep(0.02)


@contextmanager
def _pinned(cores: tuple[int, ...]) -> Iterator[None]:
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

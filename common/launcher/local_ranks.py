"""Ranks of this host as processes: started, watched by their heartbeats, and ended."""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from common.cluster.rank_environment import FOREIGN
from common.errors import DataError
from common.failures.explain import Found, find_errors, language_of, merged
from common.launcher.host_channel import host_name
from common.launcher.process_spec import ProcessSpec
from common.launcher.rank_logs import (
    both_ends,
    last_lines,
    open_log,
    read_to_end,
    write_headers,
)
from common.processes.heartbeat import DUMP_SIGNAL
from common.processes.monitor import Monitor, RankState
from common.processes.process_tree import (
    adopted_orphans,
    end_all,
    living,
    orphan_guard,
    reap,
    watch,
)
from common.whole_numbers import rank_names

DOING_ORDER = ("reading data", "computing")
"""Activities of a rank within a step, in order. Validating and saving come after, in any order."""
_MAX_SEARCHED = 64
"""Logs that are searched for known errors."""
_KILL_SECONDS = 8.0
_LEAVE_SECONDS = 2.0
"""Seconds that helpers, and processes started by ranks, may outlive the ranks."""
_DUMP_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Event: the process at ``index`` has ended. code: -n for signal n."""

    index: int
    code: int


class LocalRanks:
    """Ranks with open logs. As a context manager, it starts them and leaves none running.

    Within it, orphaned descendants become children of this process. When this process dies for any
    reason, they die too.

    address: of this host, if there are several. events: gets an Exit for each process that ends.
    Raises ConfigError if a log cannot be written.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_folder: Path,
        address: str | None,
        events: queue.SimpleQueue[Any],
    ) -> None:
        self.specs = tuple(specs)
        self._folder = log_folder
        self._address = address
        self._events = events
        self._logs = [open_log(log_folder, spec) for spec in specs]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._monitors: dict[int, Monitor] = {}
        self.codes: dict[int, int] = {}
        """Index of an ended process -> its exit code."""
        self.undead: list[int] = []
        """Processes that did not end after SIGKILL, known after the context."""
        # rank 0, or the lowest rank here
        self._shown = min(
            range(len(specs)), key=lambda index: (bool(specs[index].name), specs[index].rank)
        )
        self._shown_to = self._logs[self._shown].start

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._guard = stack.enter_context(orphan_guard())
            self._before = stack.enter_context(adopted_orphans())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            groups = [process.pid for process in self._processes.values()]
            self.undead = end_all(groups, self._before, _KILL_SECONDS)
            for process in self._processes.values():
                process.poll()
            for monitor in self._monitors.values():
                monitor.close()
            self._monitors.clear()
            reap(self._before)

    # ---- names ----

    def names(self, ranks: Collection[int] | None = None) -> str:
        """Return the numbers or titles of all ranks here, or of some."""
        found = [
            spec for spec in self.specs if not spec.name and (ranks is None or spec.rank in ranks)
        ]
        if any(spec.title for spec in found):
            return ", ".join(map(str, found))
        return rank_names([spec.rank for spec in found])

    def name(self, index: int) -> str:
        spec = self.specs[index]
        device = "" if spec.name else spec.environment.get("DEVICE_ID")
        where = [f"device {device}"] if device else []
        where += [] if self._address is None else [host_name(self._address)]
        return str(spec) + (f" ({', '.join(where)})" if where else "")

    def logs(self) -> str:
        """Return the place of the logs as one name or shell pattern."""
        names = [spec.log_folder for spec in self.specs if not spec.name]
        if len(names) > 1:
            names = list(dict.fromkeys(re.sub(r"\d+$", "*", name) for name in names))
        pattern = names[0] if len(names) == 1 else f"{{{','.join(names)}}}"
        return str(self._folder / pattern / "mindformer.log")

    def log(self, index: int) -> Path:
        return self._logs[index].path

    # ---- state ----

    @property
    def done(self) -> bool:
        """Tell whether every rank has ended; helpers may still run."""
        return all(index in self.codes for index, spec in enumerate(self.specs) if not spec.name)

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step that a rank here has reported; -1 if none."""
        found = [monitor.steps for monitor in self._monitors.values()]
        first = min((first for first, _ in found if first >= 0), default=-1)
        return first, max((last for _, last in found), default=-1)

    def read_heartbeats(self) -> None:
        now = time.monotonic()
        for monitor in self._monitors.values():
            monitor.read(now)

    def states(self) -> list[RankState]:
        """Return the states of running ranks."""
        now = time.monotonic()
        return [self._monitors[index].state(now) for index in self._running()]

    def progress(self, steps: int | None) -> str:
        """Return the progress of the shown rank, of ``steps`` if known; empty before its first
        report.
        """
        if self._shown in self.codes or self._shown not in self._monitors:
            return ""
        state = self._monitors[self._shown].state(time.monotonic())
        of_all = f" of {steps}" if steps else ""
        return f"step {state.step}{of_all}, {state.doing}" if state.step >= 0 else ""

    def _running(self) -> list[int]:
        return [
            index
            for index in self._processes
            if index not in self.codes and not self.specs[index].name
        ]

    # ---- start and end ----

    def start(self, **variables: str) -> str:
        """Start all processes. Stops at the first that cannot be started, and returns the
        reason.

        Call it from a thread that stays alive: the kernel uses the end of the starting thread as
        the end of this process. variables: for each of them.
        """
        for index, spec in enumerate(self.specs):
            try:
                self._start(index, variables)
            except OSError as error:
                return (
                    f"{self.name(index)} could not be started: {error.strerror or error}:"
                    f" {spec.command[0]}"
                )
        self._shown_to = self._logs[self._shown].start
        return ""

    def _start(self, index: int, variables: dict[str, str]) -> None:
        """Start a process in its own session, with a heartbeat and empty input. Raises OSError."""
        spec = self.specs[index]
        reading, writing = os.pipe()
        environment = {
            "PYTHONUNBUFFERED": "1",  # so that a killed rank's last lines are in its log
            **{name: value for name, value in os.environ.items() if name not in FOREIGN},
            **spec.environment,
            **variables,
            "GPT2_LAUNCHER_PID": str(os.getpid()),
            "GPT2_HEARTBEAT_FD": str(writing),
        }
        try:
            self._logs[index] = write_headers(self._logs[index], spec, environment)
            with self._logs[index].file as file, _pinned(spec.cores):
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
        self._monitors[index] = Monitor(
            rank=spec.rank,
            name=self.name(index),
            log=self.log(index),
            pid=process.pid,
            pipe=reading,
            now=time.monotonic(),
        )
        watch(process.pid, lambda code: self._events.put(Exit(index=index, code=code)))

    def terminate(self) -> None:
        """Send SIGTERM to every running rank, but not to its children, which it needs to save."""
        self._send_signal(self._running(), signal.SIGTERM)

    def show_stacks(self, ranks: Collection[int]) -> None:
        """Make hanging ranks write their stacks. Ranks without a heartbeat and stopped ranks
        cannot.
        """
        able = {
            state.rank
            for state in self.states()
            if state.silent is not None and not state.is_stopped
        }
        found = [index for index in self._running() if self.specs[index].rank in able & {*ranks}]
        self._send_signal(found, DUMP_SIGNAL)
        if found:
            time.sleep(_DUMP_SECONDS)

    def _send_signal(self, indices: Collection[int], number: int) -> None:
        for index in indices:
            with suppress(ProcessLookupError):
                # not reaped, so the number is still its own
                os.kill(self._processes[index].pid, number)

    def wait_for_leavers(self) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while living(self._before) and time.monotonic() < deadline:
            time.sleep(0.02)

    # ---- output ----

    def new_output(self) -> str:
        """Return new output of the shown rank since the last call.

        A very long output is cut to its end.
        """
        text, self._shown_to = read_to_end(self._logs[self._shown], self._shown_to)
        return text

    def tails(self, ranks: Collection[int], most: int | None = None) -> list[str]:
        """Return the last lines of the logs of those ``ranks`` that run here, at most ``most``
        logs.
        """
        lines = []
        for index in [index for index, spec in enumerate(self.specs) if spec.rank in ranks][:most]:
            lines.append(f"last lines of {self.log(index)}:")
            lines += [f"    {line}" for line in last_lines(self._logs[index]) or ["(nothing)"]]
        return lines

    def known_errors(self) -> list[str]:
        """Return a line about the known error in the logs of this run that explains most, or none.

        Causes come before ranks that waited, so the logs of all ranks here are searched.
        """
        found: list[Found] = []
        with suppress(DataError):  # a broken catalogue must not hide why the run failed
            logs = self._logs[:_MAX_SEARCHED]
            found = merged(find_errors(both_ends(log), log.path) for log in logs)
        if not found:
            return []
        meaning = found[0].error.meaning[language_of(os.environ)]
        return [
            f"known error {found[0].code}: {meaning}; python tools/doctor.py --explain"
            f" {shlex.quote(str(found[0].path))}"
        ]


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


def stalled_ranks(states: Sequence[RankState]) -> list[RankState]:
    """Return those ranks without progress that the others wait for.

    They are the stopped ones, else the silent ones, else those behind, which may be all.
    """
    stopped = [state for state in states if state.is_stopped] or [
        state for state in states if state.is_silent
    ]
    if stopped:
        return stopped
    first = min(map(_position, states))
    return [state for state in states if _position(state) == first]


def _position(state: RankState) -> tuple[int, int]:
    order = DOING_ORDER.index(state.doing) if state.doing in DOING_ORDER else len(DOING_ORDER)
    return state.step, order

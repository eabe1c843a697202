"""The ranks of this host: their processes, logs and heartbeats, together."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from common.launcher.control import host_name, rank_names
from common.launcher.heartbeat import DUMP_SIGNAL
from common.launcher.processes import ProcessSpec, end_all, living, reap, start, watch
from common.launcher.progress import Monitor, RankState
from common.launcher.rank_logs import last_lines, open_log, read_to_end, write_headers

_KILL_SECONDS = 8.0
_LEAVE_SECONDS = 2.0
"""So long may helpers, and what the ranks started, outlive the ranks."""
_DUMP_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The child at ``index`` has ended. code: -n for signal n."""

    index: int
    code: int


class LocalRanks:
    """Opens all logs, and starts nothing yet. Raises ConfigError when one cannot be written.

    address: of this host, where there are several. ``before`` of its methods: children of this process that are none of the ranks.
    """

    def __init__(self, children: Sequence[ProcessSpec], log_folder: Path, address: str | None, events: queue.SimpleQueue[Any]) -> None:
        self._children = children
        self._folder = log_folder
        self._address = address
        self._events = events
        self._logs = [open_log(log_folder, child) for child in children]
        self._processes: dict[int, Popen[bytes]] = {}
        self._monitors: dict[int, Monitor] = {}
        self.codes: dict[int, int] = {}
        """Index of a child that has ended -> its exit code."""
        self._shown = min(range(len(children)), key=lambda index: (bool(children[index].name), children[index].rank))
        self._shown_to = self._logs[self._shown].start

    def names(self, ranks: Collection[int] | None = None) -> str:
        """Of all ranks here, or of some: their numbers, or their titles."""
        found = [child for child in self._children if not child.name and (ranks is None or child.rank in ranks)]
        if any(child.title for child in found):
            return ", ".join(map(str, found))
        return rank_names([child.rank for child in found])

    @property
    def done(self) -> bool:
        """Whether every rank has ended; helpers may go on."""
        return all(index in self.codes for index, child in enumerate(self._children) if not child.name)

    def name(self, index: int) -> str:
        child = self._children[index]
        where = [] if child.name or not child.environment.get("DEVICE_ID") else [f"device {child.environment['DEVICE_ID']}"]
        where += [] if self._address is None else [host_name(self._address)]
        return str(child) + (f" ({', '.join(where)})" if where else "")

    def logs(self) -> str:
        """Where they are, as one name or pattern that a shell understands."""
        names = [child.log_folder for child in self._children if not child.name]
        patterns = dict.fromkeys(re.sub(r"\d+$", "*", name) for name in names) if len(names) > 1 else names
        pattern = ",".join(patterns)
        return str(self._folder / (f"{{{pattern}}}" if len(patterns) > 1 else pattern) / "mindformer.log")

    def log(self, index: int) -> Path:
        return self._logs[index].path

    def is_helper(self, index: int) -> bool:
        return bool(self._children[index].name)

    def rank(self, index: int) -> int:
        return self._children[index].rank

    @property
    def have_met(self) -> bool:
        """Whether the ranks here have got past a step, which takes those of all hosts."""
        return any(monitor.is_past_first_step for monitor in self._monitors.values())

    def start(self, started: Callable[[int], None]) -> str:
        """Start all of them, and call ``started`` with the number of each. At one that cannot be started it stops and returns why."""
        for index, child in enumerate(self._children):
            reading, writing = os.pipe()
            environment = {
                "PYTHONUNBUFFERED": "1",  # a killed rank's last lines are then in its log
                **os.environ,
                **child.environment,
                "GPT2_LAUNCHER_PID": str(os.getpid()),
                "GPT2_HEARTBEAT_FD": str(writing),
            }
            log = self._logs[index] = write_headers(self._logs[index], child, environment)
            try:
                process = start(child, environment, log.file, writing)
            except OSError as error:
                os.close(reading)
                return f"{self.name(index)} could not be started: {error.strerror or error}: {child.command[0]}"
            finally:
                os.close(writing)
                log.file.close()
            started(process.pid)
            self._processes[index] = process
            self._monitors[index] = Monitor(
                rank=child.rank, name=self.name(index), log=log.path, pid=process.pid, pipe=reading, now=time.monotonic()
            )
            watch(process.pid, lambda code, index=index: self._events.put(Exit(index=index, code=code)))  # type: ignore[misc]
        self._shown_to = self._logs[self._shown].start
        return ""

    def read_heartbeats(self) -> None:
        now = time.monotonic()
        for monitor in self._monitors.values():
            monitor.read(now)

    def states(self) -> list[RankState]:
        """Of the ranks that run."""
        now = time.monotonic()
        return [self._monitors[index].state(now) for index in self._running()]

    def new_output(self) -> str:
        """What rank 0, else the lowest rank here, has written since the last call; of very much text the end."""
        text, self._shown_to = read_to_end(self._logs[self._shown], self._shown_to)
        return text

    def progress(self, steps: int | None) -> str:
        """How far that rank is, of so many steps where that is known; empty before its first step."""
        if self._shown in self.codes or self._shown not in self._monitors:
            return ""
        state = self._monitors[self._shown].state(time.monotonic())
        return f"step {state.step}{f' of {steps}' if steps else ''}, {state.doing}" if state.step >= 0 else ""

    def terminate(self) -> None:
        """SIGTERM to every rank that runs; not to what it started, which it needs to save."""
        for index in self._running():
            os.kill(self._processes[index].pid, signal.SIGTERM)  # not reaped yet: the number is still its own

    def dump_stacks(self, ranks: Collection[int]) -> None:
        """Let those that hang write into their logs where. One without a heartbeat, or stopped, could not."""
        able = [state.rank for state in self.states() if state.silent is not None and not state.is_stopped]
        asked = [index for index in self._running() if self.rank(index) in ranks and self.rank(index) in able]
        for index in asked:
            os.kill(self._processes[index].pid, DUMP_SIGNAL)
        if asked:
            time.sleep(_DUMP_SECONDS)

    def wait_for_leavers(self, before: Collection[int]) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while living(before) and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self, before: Collection[int]) -> list[int]:
        """Kill whatever is left, children and theirs. Returns the numbers of processes that do not end."""
        left = end_all([process.pid for process in self._processes.values()], before, _KILL_SECONDS)
        for process in self._processes.values():
            process.poll()
        for monitor in self._monitors.values():
            monitor.close()
        self._monitors.clear()
        reap(before)
        return left

    def tails(self, ranks: Collection[int], most: int | None = None) -> list[str]:
        """The last lines of the logs of those among ``ranks`` that run here, of ``most`` logs at most."""
        lines = []
        for index in [index for index, child in enumerate(self._children) if child.rank in ranks][:most]:
            lines.append(f"last lines of {self.log(index)}:")
            lines += [f"    {line}" for line in last_lines(self._logs[index]) or ["(nothing)"]]
        return lines

    def _running(self) -> list[int]:
        return [index for index in self._monitors if index not in self.codes and not self.is_helper(index)]

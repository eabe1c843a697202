"""Ranks of this host with their processes, logs and heartbeats."""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from common.errors import DataError
from common.failures.explain import Found, find_errors, language_of, merged
from common.launcher.control import host_name
from common.launcher.rank_logs import (
    both_ends,
    last_lines,
    open_log as open_rank_log,
    read_to_end,
    write_headers,
)
from common.processes.monitor import RankState
from common.processes.ranks import ProcessSpec, Ranks
from common.whole_numbers import rank_names

DOING_ORDER = ("reading data", "computing")
"""Activities of a rank within a step, in order. Validating and saving come after, in any order."""
_SEARCHED = 64
"""Most logs that are searched for known errors."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Event: the child at ``index`` has ended. code: -n for signal n."""

    index: int
    code: int


class LocalRanks(Ranks):
    """Ranks with open logs, not yet started. Raises ConfigError if a log cannot be written.

    address: of this host, if there are several. events: gets an Exit for each process that ends.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_folder: Path,
        address: str | None,
        events: queue.SimpleQueue[Any],
    ) -> None:
        super().__init__(specs)
        self._folder = log_folder
        self._address = address
        self._events = events
        self._logs = [open_rank_log(log_folder, spec) for spec in specs]
        self.codes: dict[int, int] = {}
        """Index of an ended child -> its exit code."""
        self._shown = min(
            range(len(specs)), key=lambda index: (bool(specs[index].name), specs[index].rank)
        )
        self._shown_to = self._logs[self._shown].start

    def names(self, ranks: Collection[int] | None = None) -> str:
        """Return the numbers or titles of all ranks here, or of some."""
        found = [
            spec for spec in self.specs if not spec.name and (ranks is None or spec.rank in ranks)
        ]
        if any(spec.title for spec in found):
            return ", ".join(map(str, found))
        return rank_names([spec.rank for spec in found])

    @property
    def done(self) -> bool:
        """Tell whether every rank has ended; helpers may still run."""
        return all(index in self.codes for index, spec in enumerate(self.specs) if not spec.name)

    def name(self, index: int) -> str:
        spec = self.specs[index]
        device = "" if spec.name else spec.environment.get("DEVICE_ID")
        where = [f"device {device}"] if device else []
        where += [] if self._address is None else [host_name(self._address)]
        return str(spec) + (f" ({', '.join(where)})" if where else "")

    def logs(self) -> str:
        """Return the place of the logs as one name or shell pattern."""
        names = [spec.log_folder for spec in self.specs if not spec.name]
        patterns = (
            dict.fromkeys(re.sub(r"\d+$", "*", name) for name in names) if len(names) > 1 else names
        )
        pattern = ",".join(patterns)
        return str(
            self._folder / (f"{{{pattern}}}" if len(patterns) > 1 else pattern) / "mindformer.log"
        )

    def log(self, index: int) -> Path:
        return self._logs[index].path

    def is_helper(self, index: int) -> bool:
        return bool(self.specs[index].name)

    @property
    def have_met(self) -> bool:
        """Tell whether the ranks here have finished a step, which needs those of all hosts."""
        return any(monitor.is_past_first_step for monitor in self.monitors.values())

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step that a rank here has reported; -1 if none."""
        found = [monitor.steps for monitor in self.monitors.values()]
        first = min((first for first, _ in found if first >= 0), default=-1)
        return first, max((last for _, last in found), default=-1)

    def start(self) -> str:
        """Start all processes. Stops at the first that cannot be started, and returns the
        reason.
        """
        for index, spec in enumerate(self.specs):
            try:
                self.start_one(index)
            except OSError as error:
                return (
                    f"{self.name(index)} could not be started: {error.strerror or error}:"
                    f" {spec.command[0]}"
                )
        self._shown_to = self._logs[self._shown].start
        return ""

    def open_log(self, index: int, environment: Mapping[str, str]) -> IO[bytes]:
        self._logs[index] = write_headers(self._logs[index], self.specs[index], environment)
        return self._logs[index].file

    def ended(self, index: int, code: int) -> None:
        self._events.put(Exit(index=index, code=code))

    def read_heartbeats(self) -> None:
        now = time.monotonic()
        for monitor in self.monitors.values():
            monitor.read(now)

    def states(self) -> list[RankState]:
        """Return the states of running ranks."""
        now = time.monotonic()
        return [self.monitors[index].state(now) for index in self._running()]

    def new_output(self) -> str:
        """Return new output of rank 0, or of the lowest rank here, since the last call.

        A very long output is cut to its end.
        """
        text, self._shown_to = read_to_end(self._logs[self._shown], self._shown_to)
        return text

    def progress(self, steps: int | None) -> str:
        """Return the progress of that rank, of ``steps`` if known; empty before its first
        report.
        """
        if self._shown in self.codes or self._shown not in self.monitors:
            return ""
        state = self.monitors[self._shown].state(time.monotonic())
        return (
            f"step {state.step}{f' of {steps}' if steps else ''}, {state.doing}"
            if state.step >= 0
            else ""
        )

    def terminate(self) -> None:
        """Send SIGTERM to every running rank, but not to its children, which it needs to save."""
        self.send_signal(self._running(), signal.SIGTERM)

    def show_stacks(self, ranks: Collection[int]) -> None:
        """Make hanging ranks write their stacks. Ranks without a heartbeat and stopped ranks
        cannot.
        """
        able = [
            state.rank
            for state in self.states()
            if state.silent is not None and not state.is_stopped
        ]
        self.dump_stacks(
            [index for index in self._running() if self.specs[index].rank in {*ranks} & {*able}]
        )

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
            found = merged(find_errors(both_ends(log), log.path) for log in self._logs[:_SEARCHED])
        if not found:
            return []
        meaning = found[0].error.meaning[language_of(os.environ)]
        return [
            f"known error {found[0].code}: {meaning}; python tools/doctor.py --explain"
            f" {shlex.quote(str(found[0].path))}"
        ]

    def _running(self) -> list[int]:
        return [
            index
            for index in self.monitors
            if index not in self.codes and not self.is_helper(index)
        ]


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

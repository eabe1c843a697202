"""The ranks of this host: their processes, logs and heartbeats, together."""

from __future__ import annotations

import queue
import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from common.launcher.control import host_name
from common.launcher.rank_logs import (
    last_lines,
    open_log as open_rank_log,
    read_to_end,
    write_headers,
)
from common.processes.monitor import RankState
from common.processes.ranks import ProcessSpec, Ranks
from common.whole_numbers import rank_names

DOING_ORDER = ("reading data", "computing")
"""What a rank does within a step, in order. Validating and saving come after, in no fixed order."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The child at ``index`` has ended. code: -n for signal n."""

    index: int
    code: int


class LocalRanks(Ranks):
    """Opens all logs, and starts nothing yet. Raises ConfigError when one cannot be written.

    address: of this host, where there are several. events: gets an Exit for each process that ends.
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
        """Index of a child that has ended -> its exit code."""
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
        """Whether every rank has ended; helpers may go on."""
        return all(index in self.codes for index, spec in enumerate(self.specs) if not spec.name)

    def name(self, index: int) -> str:
        spec = self.specs[index]
        device = "" if spec.name else spec.environment.get("DEVICE_ID")
        where = [f"device {device}"] if device else []
        where += [] if self._address is None else [host_name(self._address)]
        return str(spec) + (f" ({', '.join(where)})" if where else "")

    def logs(self) -> str:
        """Return where they are, as one name or pattern that a shell understands."""
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
        """Whether the ranks here have got past a step, which takes those of all hosts."""
        return any(monitor.is_past_first_step for monitor in self.monitors.values())

    def start(self) -> str:
        """Start all of them. At one that cannot be started it stops and returns why."""
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
        """Return those of the ranks that run."""
        now = time.monotonic()
        return [self.monitors[index].state(now) for index in self._running()]

    def new_output(self) -> str:
        """Return what rank 0, else the lowest rank here, has written since the last call.

        Of very much text it is the end.
        """
        text, self._shown_to = read_to_end(self._logs[self._shown], self._shown_to)
        return text

    def progress(self, steps: int | None) -> str:
        """Say how far that rank is, of so many steps where that is known; empty before its
        first.
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
        """SIGTERM to every rank that runs; not to what it started, which it needs to save."""
        self.send_signal(self._running(), signal.SIGTERM)

    def show_stacks(self, ranks: Collection[int]) -> None:
        """Let ranks that hang write where; one without a heartbeat, or stopped, could not."""
        able = [
            state.rank
            for state in self.states()
            if state.silent is not None and not state.is_stopped
        ]
        self.dump_stacks(
            [index for index in self._running() if self.specs[index].rank in {*ranks} & {*able}]
        )

    def tails(self, ranks: Collection[int], most: int | None = None) -> list[str]:
        """Return the last lines of the logs of those ``ranks`` that run here, ``most`` logs at
        most.
        """
        lines = []
        for index in [index for index, spec in enumerate(self.specs) if spec.rank in ranks][:most]:
            lines.append(f"last lines of {self.log(index)}:")
            lines += [f"    {line}" for line in last_lines(self._logs[index]) or ["(nothing)"]]
        return lines

    def _running(self) -> list[int]:
        return [
            index
            for index in self.monitors
            if index not in self.codes and not self.is_helper(index)
        ]


def stalled_ranks(states: Sequence[RankState]) -> list[RankState]:
    """Of ranks without progress, return those that the others wait for.

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

"""Progress of a rank, as known to the process that started it: the other end of the heartbeat."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from common.processes.heartbeat import ALIVE, ALIVE_SECONDS
from common.processes.process_tree import process_state
from common.whole_numbers import whole_number

STOPPED = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "t"}
"""States of a process stopped by a signal or a debugger, and the letters of ps for them."""
_SILENT_SECONDS = 5 * ALIVE_SECONDS


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
    """State as ``process_state`` returns it."""

    def in_words(self) -> str:
        where = "it has not reached its first step"
        if self.step >= 0:
            where = f"its last report was step {self.step}, {self.doing}"
        why = ""
        if self.is_stopped:
            why = f"; its process is stopped (state {STOPPED[self.process_state]})"
        elif self.process_state == psutil.STATUS_DISK_SLEEP:
            why = "; its process waits for a disk or a driver (state D)"
        elif self.is_silent:
            why = f"; its process has given no sign of life for {self.silent:.0f} s"
        return (
            f"{self.name} has made no progress for {self.idle:.0f} s: {where}{why}; its log:"
            f" {self.log}"
        )

    @property
    def is_stopped(self) -> bool:
        return self.process_state in STOPPED

    @property
    def is_silent(self) -> bool:
        return self.silent is not None and self.silent > _SILENT_SECONDS


class Monitor:
    """Reader of the heartbeat pipe of one rank. now: seconds of time.monotonic()."""

    def __init__(self, *, rank: int, name: str, log: Path, pid: int, pipe: int, now: float) -> None:
        self._told = RankState(rank=rank, name=name, log=str(log))
        self._first_step = -1
        self._pid, self._pipe, self._rest = pid, pipe, b""
        self._moved = now
        self._heard: float | None = None
        os.set_blocking(pipe, False)

    def read(self, now: float) -> None:
        """Process the reports since the last call."""
        try:
            while chunk := os.read(self._pipe, 65536):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace"), now)
        except BlockingIOError:
            pass

    def _take(self, line: str, now: float) -> None:
        self._heard = now
        step, _, doing = line.partition(" ")
        number = whole_number(step)
        if line != ALIVE and number is not None:
            self._told, self._moved = replace(self._told, step=number, doing=doing), now
            if self._first_step < 0:
                self._first_step = number

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step reported; -1 if none."""
        return self._first_step, self._told.step

    @property
    def process_state(self) -> str:
        return process_state(self._pid)

    def state(self, now: float) -> RankState:
        silent = None if self._heard is None else now - self._heard
        return replace(
            self._told, idle=now - self._moved, silent=silent, process_state=self.process_state
        )

    def close(self) -> None:
        os.close(self._pipe)

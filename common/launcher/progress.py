"""How far every rank is, as its launcher knows it, and which of them hold the others up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.launcher.heartbeat import ALIVE, ALIVE_SECONDS
from common.whole_numbers import whole_number

DOING_ORDER = ("reading data", "computing")
"""What a rank does within a step, in order; validating and saving come after, in an order that changes."""
_SILENT_SECONDS = 5 * ALIVE_SECONDS


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank that runs. name: the rank and where it is; log: path on its host."""

    rank: int
    name: str
    log: str
    step: int
    """-1: it has not told yet."""
    doing: str
    idle: float
    """Seconds since its step or what it does last changed, or was told again."""
    silent: float | None
    """Seconds since its last sign of life; None: there was none yet."""
    process_state: str
    """The letter of /proc/PID/stat: R runs, S sleeps, D waits for a disk or driver, T is stopped; empty: unknown."""

    def in_words(self) -> str:
        where = f"its last word was step {self.step}, {self.doing}" if self.step >= 0 else "it has not come to its first step"
        why = ""
        if self.is_stopped:
            why = f"; its process is stopped (state {self.process_state})"
        elif self.process_state == "D":
            why = "; its process waits for a disk or a driver (state D)"
        elif self.is_silent:
            why = f"; its process has given no sign of life for {self.silent:.0f} s"
        return f"{self.name} has made no progress for {self.idle:.0f} s: {where}{why}; its log: {self.log}"

    @property
    def is_stopped(self) -> bool:
        return self.process_state in ("T", "t")

    @property
    def is_silent(self) -> bool:
        return self.silent is not None and self.silent > _SILENT_SECONDS


def stalled_ranks(states: Sequence[RankState]) -> list[RankState]:
    """Of ranks that do not get on, those the others wait for: stopped or silent ones, else those behind, else all."""
    stopped = [state for state in states if state.is_stopped] or [state for state in states if state.is_silent]
    if stopped:
        return stopped
    positions = [_position(state) for state in states]
    return [state for state, position in zip(states, positions, strict=True) if position == min(positions)]


def _position(state: RankState) -> tuple[int, int]:
    return state.step, DOING_ORDER.index(state.doing) if state.doing in DOING_ORDER else len(DOING_ORDER)


class Monitor:
    """Reads one rank's heartbeat pipe. now: seconds of time.monotonic()."""

    def __init__(self, *, rank: int, name: str, log: Path, pid: int, pipe: int, now: float) -> None:
        self._rank, self._name, self._log, self._pid, self._pipe = rank, name, log, pid, pipe
        self._step, self._doing = -1, "starting"
        self._first_step = -1
        self._moved, self._heard = now, None
        self._rest = b""
        os.set_blocking(pipe, False)

    _heard: float | None

    def read(self, now: float) -> None:
        """Take in what the rank has told since the last call."""
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
            self._step, self._doing, self._moved = number, doing, now
            if self._first_step < 0:
                self._first_step = self._step

    @property
    def is_past_first_step(self) -> bool:
        """For a step all ranks are needed: they have met."""
        return self._step > self._first_step

    def state(self, now: float) -> RankState:
        return RankState(
            rank=self._rank,
            name=self._name,
            log=str(self._log),
            step=self._step,
            doing=self._doing,
            idle=now - self._moved,
            silent=None if self._heard is None else now - self._heard,
            process_state=process_state(self._pid),
        )

    def close(self) -> None:
        os.close(self._pipe)


def process_state(pid: int) -> str:
    """The state letter of a process; empty where it or /proc is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""

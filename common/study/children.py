"""The processes of one run of a cell: started, waited for, ended, and how they ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from common.processes.process_tree import Descendants, in_words
from common.study.results import State
from common.study.starting import Launch

LAUNCHER_LOG = "launcher.log"
_TICK_SECONDS = 0.1
_BETWEEN_SIGNALS = 1.0
"""A second SIGTERM to a launcher kills its ranks; it must not come at once."""
_STOP_SECONDS = 15.0
_END_SECONDS = 10.0
"""Seconds in which the processes of a run end: after the second SIGTERM, and after SIGKILL."""
_OTHERS_SECONDS = 30.0
"""Seconds that other hosts' launchers may run after one has failed."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_MEMORY = re.compile(r"out of memory|OutOfMemoryError|std::bad_alloc|Cannot allocate memory")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of a run's processes. killed_for_memory: the kernel ended some for lack of it."""

    code: int
    seconds: float
    timed_out: bool = False
    killed_for_memory: bool = False


def run_launches(started: Sequence[Launch], log: Path, limit: float) -> Outcome:
    """Start the processes of a run, wait for them at most ``limit`` seconds, and leave none.

    Their output goes to ``log``. If this process dies for any reason, they are ended.
    """
    began, kills = time.monotonic(), _kills_for_memory()
    with log.open("wb") as output, Descendants(_END_SECONDS) as descendants:
        children: list[subprocess.Popen[bytes]] = []
        try:
            for launch in started:
                environment = {**os.environ, **launch.environment}
                child = descendants.start(launch.command, cores=launch.cores, env=environment, stdout=output)
                children.append(child)
            late = _wait(children, began + limit)
            if late:
                _stop(children)
        except OSError as error:
            output.write(f"error: {started[0].command[0]}: {error.strerror or error}\n".encode())
            return Outcome(code=2, seconds=time.monotonic() - began)
        except BaseException:  # Ctrl-C, or SIGTERM
            _stop(children)
            raise
    codes = [child.returncode if child.returncode is not None else 1 for child in children]
    return Outcome(
        code=next((code for code in codes if code), 0),
        seconds=time.monotonic() - began,
        timed_out=late,
        killed_for_memory=_kills_for_memory() > kills,
    )


def _wait(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended, or one has failed and the others had their time. Returns whether
    the deadline came.
    """
    failed_at: float | None = None
    while None in (codes := [child.poll() for child in children]):
        moment = time.monotonic()
        if moment > deadline:
            return True
        if failed_at is None and any(codes):
            failed_at = moment
        if failed_at is not None and moment - failed_at > _OTHERS_SECONDS:
            return False
        time.sleep(_TICK_SECONDS)
    return False


def _stop(children: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask launchers to end their ranks, twice, as the first signal lets them save."""
    for seconds in (_BETWEEN_SIGNALS, _STOP_SECONDS):
        for child in children:
            child.terminate()
        deadline = time.monotonic() + seconds
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)


def _kills_for_memory() -> int:
    """Return how many processes the kernel has ended for lack of memory, here or in this
    container, as far as it says.
    """
    found = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError, ValueError):
            for line in Path(path).read_text(encoding="utf-8").splitlines():
                name, _, number = line.partition(" ")
                found += int(number) if name == "oom_kill" else 0
    return found


def judge(outcome: Outcome, folder: Path, limit: float) -> tuple[State, str]:
    """Return the state of a run that has ended, and the reason in one line."""
    if outcome.timed_out:
        return State.TIMED_OUT, f"did not end within {limit:g} s (time_limit)"
    if outcome.code == 0:
        return State.FINISHED, ""
    said = list(_errors(folder))
    # of any kill the launcher says that memory may have been short
    certain = [line for line in said if "killed by signal" not in line]
    memory = next((line for line in certain if _MEMORY.search(line)), "")
    if memory:
        return State.OUT_OF_MEMORY, memory
    if outcome.killed_for_memory and outcome.code in _KILLED:
        return State.OUT_OF_MEMORY, "the kernel ended a process for lack of memory (SIGKILL)"
    reason = said[-1] if said else f"the launcher {in_words(outcome.code)}; see {LAUNCHER_LOG}"
    return (State.REFUSED if outcome.code == 2 else State.FAILED), reason


def _errors(folder: Path) -> Iterator[str]:
    """Yield the messages of the launcher and of the ranks, the more telling ones last."""
    launcher = _tail(folder / LAUNCHER_LOG)
    ranks = chain.from_iterable(_tail(path) for path in sorted(folder.glob("mf_parallel*/mindformer.log")))
    for line in chain(launcher, ranks):
        if found := re.search(r"(?:^|\s)error: (.+)|^([\w.]*(?:Error|Exception)\b.*)", line):
            yield (found[1] or found[2]).strip()[:500]


def _tail(path: Path, size: int = 1 << 16) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []

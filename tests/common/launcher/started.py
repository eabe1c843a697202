"""Launchers in processes of their own, and programs for their ranks."""

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common.launcher.rank_process import ProcessSpec
from common.launcher.supervisor import Job

ROOT = Path(__file__).resolve().parents[3]
NEVER = 1e6
BEAT = (
    f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r}); from"
    " common.processes.heartbeat import beat, start_heartbeat;start_heartbeat();"
)
SLEEP = BEAT + "print('ready'); time.sleep(600)"
SAVE_AND_LEAVE = BEAT + "signal.signal(15, lambda *_: (print('saved'), sys.exit(143))); print('ready'); time.sleep(600)"
IGNORE = BEAT + "signal.signal(15, signal.SIG_IGN); print('ready'); time.sleep(600)"
FAILS = BEAT + "[beat(step, 'computing') for step in (1, 2)]; raise SystemExit(7)"
SUPERVISOR = """
import pickle, sys
from common.errors import ConfigError
from common.launcher import host_channel, supervisor
job, times, most, seconds = pickle.loads(bytes.fromhex(sys.argv[1]))
for module in (host_channel, supervisor):
    vars(module).update({name: times[name] for name in times.keys() & vars(module).keys()})
supervisor.pause = lambda failures: seconds * bool(failures)
try:
    sys.exit(supervisor.run_attempts(lambda number: job, most=most, folder=job.log_folder).code)
except ConfigError as error:
    print("error:", error)
    sys.exit(2)
"""


def children(
    *programs: str, arguments: tuple[str, ...] = (), ranks: Sequence[int] = range(99), **more: str
) -> tuple[ProcessSpec, ...]:
    """Return a process for each program. more: variables of all."""
    return tuple(
        ProcessSpec(
            rank=rank,
            command=(sys.executable, "-c", program, *arguments),
            environment={"DEVICE_ID": str(rank + 4), **more},
        )
        for rank, program in zip(ranks, programs, strict=False)
    )


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def log(folder: Path, rank: int) -> str:
    path = folder / f"mf_parallel{rank}" / "mindformer.log"
    return path.read_text(errors="replace") if path.exists() else ""


def until_ready(folder: Path, ranks: Sequence[int]) -> None:
    until(lambda: all("ready" in log(folder, rank) for rank in ranks))


class Started:
    """``run_attempts`` in a process of its own. times: constants of it and of its channel.

    options: of the job, or of Popen.
    """

    def __init__(
        self,
        folder: Path,
        ranks: tuple[ProcessSpec, ...],
        *,
        times: Mapping[str, float] = MappingProxyType({}),
        most: int = 0,
        pause: float = 0.0,
        **options: Any,
    ) -> None:
        names = {field.name for field in fields(Job)} & options.keys()
        words = {"stall_limit": NEVER} | {name: options.pop(name) for name in names}
        job = Job(children=ranks, log_folder=folder, **words)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, pickle.dumps((job, dict(times), most, pause)).hex()],
            cwd=ROOT,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options},
        )

    def until_ready(self, ranks: int) -> list[int]:
        """Wait until each of the first ``ranks`` has written ``ready``; the numbers of this process's children."""
        until_ready(self.folder, range(ranks))
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in task.read_text().split()]

    def until_said(self, words: str) -> str:
        assert self.process.stdout is not None
        text = ""
        while words not in text:
            line = self.process.stdout.readline()
            assert line, text
            text += line
        return text

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=40)
        return self.process.returncode, output


@contextmanager
def ended_after() -> Iterator[list[Started]]:
    """Yield a list whose launchers are killed at the end."""
    started: list[Started] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.communicate()

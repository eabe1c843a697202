"""The processes of one run of a cell: started by the commands by which a user starts runs, waited for,
ended, and how they ended.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from common.cluster.rank_environment import rank_command
from common.launcher.launch import TOOL
from common.launcher.request import NO_TABLE
from common.paths import ROOT
from common.processes.addresses import LOOPBACK, free_port
from common.processes.process_tree import Descendants, cores_of_ranks, in_words
from gpt2_study.cells import PlannedCell, words_of
from gpt2_study.results import State

PEER_FOLDER = ROOT / "benchmarks" / "peers"
_SCRIPT = ROOT / "scripts" / "run_distribute.sh"


@dataclass(frozen=True, kw_only=True)
class Where:
    """Place of the runs. hosts: names for ssh; empty: this machine. slurm: into the job that the study itself is in."""

    hosts: tuple[str, ...] = ()
    slurm: bool = False


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process to start. cores: that it and its ranks keep to; empty: all. environment: added
    to the variables of this process.
    """

    command: tuple[str, ...]
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def reason_not_started(planned: PlannedCell, where: Where) -> str:
    """Return why a cell cannot be started there, one line; empty where it can."""
    if planned.config is None:
        return planned.refusal
    cell = planned.cell
    if where.hosts and cell.hosts > len(where.hosts):
        return f"needs {cell.hosts} hosts, and --hosts names {len(where.hosts)}"
    if planned.config.parallel.strategy == "horovod" and shutil.which("horovodrun") is None:
        return "parallel.strategy=horovod: horovodrun is not on PATH; install horovod to have it"
    return ""


def launches(planned: PlannedCell, folder: Path, where: Where) -> list[Launch]:
    """Return the processes that make one run of a cell, in ``folder``."""
    cell = planned.cell
    base, words = ROOT / cell.base, (*words_of(cell.settings), f"output_dir={folder}")
    program = PEER_FOLDER / f"{cell.peer}.py" if cell.peer else None
    each = cell.ranks // cell.hosts
    rank = rank_command(base, "train", words, program=program)
    if planned.config is not None and planned.config.parallel.strategy == "horovod":
        names = where.hosts[: cell.hosts] or ("localhost",)
        slots = ",".join(f"{name}:{cell.ranks // len(names)}" for name in names)
        return [Launch(command=("horovodrun", "-np", str(cell.ranks), "-H", slots, *rank))]
    if where.slurm:
        cores = os.environ.get("SLURM_CPUS_PER_TASK")  # not every version hands it on to srun
        shape: tuple[str, ...] = (f"--cpus-per-task={cores}",) if cores else ()
        shape += (f"--nodes={cell.hosts}", f"--ntasks={cell.ranks}", f"--ntasks-per-node={each}")
        return [Launch(command=("srun", "--kill-on-bad-exit=1", *shape, *rank))]
    start: tuple[str, ...] = (sys.executable, str(TOOL), "distribute", "--quiet")
    start += ("--program", str(program)) if program else ()

    def positional(first: int) -> tuple[str, ...]:
        return NO_TABLE[0], str(base), f"[{first},{first + each})", "train", *words

    if where.hosts or cell.hosts == 1:
        over_ssh = ("--ssh", "--hosts", ",".join(where.hosts[: cell.hosts])) if where.hosts else ()
        return [Launch(command=(*start, *over_ssh, *positional(0)))]
    meet = ("--master", f"{LOOPBACK}:{free_port()}", "--nnodes", str(cell.hosts), "--node_rank")
    return [
        Launch(command=(*start, *meet, str(node), *positional(node * each)), cores=cores)
        for node, cores in enumerate(cores_of_ranks(cell.hosts))
    ]


def shell_command(found: Sequence[Launch]) -> list[str]:
    """Return what a user types in the folder of the project for the same run; launches of several hosts are one line
    for bash.
    """
    typed = [[*launch.command] for launch in found]
    for words in typed:
        if words[1:3] == [str(TOOL), "distribute"]:
            words[:4] = ["bash", os.path.relpath(_SCRIPT, ROOT)]
    return typed[0] if len(typed) == 1 else ["bash", "-c", " & ".join(map(shlex.join, typed)) + " & wait"]


LAUNCHER_LOG = "launcher.log"
_TICK_SECONDS = 0.1
_BETWEEN_SIGNALS = 1.0
"""A second SIGTERM to a launcher kills its ranks; it must not come at once."""
_STOP_SECONDS = 15.0
_END_SECONDS = 10.0
"""Seconds in which the processes of a run end: after the second SIGTERM, and after SIGKILL."""
_OTHERS_SECONDS = 30.0
"""Seconds that other hosts' launchers may run after one has failed."""
_TAIL_BYTES = 2**16
"""Bytes at the end of each log in which messages are looked for."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_MEMORY = re.compile(r"out of memory|OutOfMemoryError|std::bad_alloc|Cannot allocate memory")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of a run's processes. reason: one line, empty where they finished."""

    state: State
    reason: str
    code: int
    seconds: float


def run_launches(started: Sequence[Launch], folder: Path, limit: float) -> Outcome:
    """Start the processes of a run, wait for them at most ``limit`` seconds, and leave none.

    Their output goes to LAUNCHER_LOG in ``folder``, the folder of the run. If this process dies for
    any reason, they are ended.
    """
    began, kills, code, late = time.monotonic(), _kills_for_memory(), 0, False
    children: list[subprocess.Popen[bytes]] = []
    with (folder / LAUNCHER_LOG).open("wb") as output, Descendants(_END_SECONDS) as descendants:
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
            code = 2
        except BaseException:  # Ctrl-C, or SIGTERM
            _stop(children)
            raise
    code = code or next((child.returncode or 1 for child in children if child.returncode != 0), 0)
    state, reason = judge(code, folder, killed_for_memory=_kills_for_memory() > kills)
    if late:
        state, reason = State.TIMED_OUT, f"did not end within {round(limit, 1):g} s (time_limit)"
    return Outcome(state=state, reason=reason, code=code, seconds=time.monotonic() - began)


def _wait(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait until all have ended, or one has failed and the others had their time. Returns whether the deadline came."""
    end = deadline
    while None in (codes := [child.poll() for child in children]):
        moment = time.monotonic()
        if moment > deadline:
            return True
        if any(codes):
            end = min(end, moment + _OTHERS_SECONDS)
        if moment > end:
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


def judge(code: int, folder: Path, *, killed_for_memory: bool = False) -> tuple[State, str]:
    """Return the state of a run that ended with this exit code, and the reason in one line.

    killed_for_memory: the kernel has ended some process meanwhile for lack of memory.
    """
    if code == 0:
        return State.FINISHED, ""
    said = []  # by the launcher and the ranks, the more telling messages last
    for path in (folder / LAUNCHER_LOG, *sorted(folder.glob("mf_parallel*/mindformer.log"))):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        for line in text.splitlines():
            if found := re.search(r"(?:^|\s)error: (.+)|^([\w.]*(?:Error|Exception)\b.*)", line):
                said.append((found[1] or found[2]).strip()[:500])
    # of any kill the launcher says that memory may have been short
    certain = [line for line in said if "killed by signal" not in line]
    if memory := next(filter(_MEMORY.search, certain), ""):
        return State.OUT_OF_MEMORY, memory
    if killed_for_memory and code in _KILLED:
        return State.OUT_OF_MEMORY, "the kernel ended a process for lack of memory (SIGKILL)"
    reason = said[-1] if said else f"the launcher {in_words(code)}; see {LAUNCHER_LOG}"
    return (State.REFUSED if code == 2 else State.FAILED), reason

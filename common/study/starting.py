"""Start of a cell's run, by the commands by which a user starts runs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.cluster.rank_environment import rank_command
from common.launcher.launch import TOOL
from common.launcher.request import NO_TABLE
from common.paths import ROOT
from common.processes.addresses import LOOPBACK, free_port
from common.processes.process_tree import cores_of_ranks
from common.study.cells import PlannedCell

PEER_FOLDER = ROOT / "benchmarks" / "peers"
_SCRIPT = ROOT / "scripts" / "run_distribute.sh"


@dataclass(frozen=True, kw_only=True)
class Where:
    """Place of the runs. hosts: names for ssh; empty: this machine. slurm: into the job that the
    study itself is in.
    """

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

    def typed(self) -> list[str]:
        """Return the words as a user types them, in the folder of the project."""
        words = list(self.command)
        if words[1:3] == [str(TOOL), "distribute"]:
            return ["bash", os.path.relpath(_SCRIPT, ROOT), *words[4:]]
        return words


def find_slurm(environ: Mapping[str, str]) -> bool:
    """Whether this is the script of a Slurm job, or a shell in one, but no task of a step."""
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_NODELIST" not in environ


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
    cell, base, words = planned.cell, planned.base, (*planned.words, f"output_dir={folder}")
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
    if where.hosts:
        names = where.hosts[: cell.hosts]
        over_ssh = (*start, "--ssh", "--hosts", ",".join(names))
        return [Launch(command=(*over_ssh, *_positional(base, range(each), words)))]
    if cell.hosts == 1:
        return [Launch(command=(*start, *_positional(base, range(each), words)))]
    meet = ("--master", f"{LOOPBACK}:{free_port()}", "--nnodes", str(cell.hosts), "--node_rank")
    return [
        Launch(
            command=(*start, *meet, str(node), *_positional(base, range(node * each, (node + 1) * each), words)),
            cores=cores,
        )
        for node, cores in enumerate(cores_of_ranks(cell.hosts))
    ]


def _positional(base: Path, devices: range, words: Sequence[str]) -> tuple[str, ...]:
    return (NO_TABLE[0], str(base), f"[{devices.start},{devices.stop})", "train", *words)


def shell_command(found: Sequence[Launch]) -> list[str]:
    """Return the shell command of the same run; launches of several hosts as one line for bash."""
    if len(found) == 1:
        return found[0].typed()
    lines = [shlex.join(launch.typed()) for launch in found]
    return ["bash", "-c", " & ".join(lines) + " & wait"]

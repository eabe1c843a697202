"""Several ranks on this machine: every job in turn, each rank a process that goes through all of them.

    run_ranks(2, [job, job])    starts ``python tests/ranks.py`` twice

A job is the tree of a configuration, with "run_mode" where that is not train. One start serves many jobs, since importing the framework
takes longer than they do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Job = dict[str, Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets, and one thread."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPT2_")}
    return clean | {key: str(value) for key, value in names.items()} | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def start_ranks(
    ranks: int, jobs: Sequence[Job], *, other: dict[int, Sequence[Job]] | None = None, variables: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """The processes of ``ranks`` ranks, by rank. other: ranks that are given other jobs. variables: more of the environment."""
    ports = [free_port() for _ in jobs]  # one a job: a rank that is early must not meet the group of the job before
    return [
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), json.dumps([ports, list((other or {}).get(rank, jobs))])],
            cwd=ROOT,
            env=rank_environment(rank, ranks, ports[0]) | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def end_ranks(processes: list[subprocess.Popen[str]], *, seconds: float = 120.0) -> tuple[list[int], list[str]]:
    """Exit codes and what was printed, by rank; no process is left."""
    try:
        printed = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], printed


def run_ranks(ranks: int, jobs: Sequence[Job], *, variables: Mapping[str, str] | None = None) -> None:
    """Start and wait. Every rank must succeed."""
    codes, printed = end_ranks(start_ranks(ranks, jobs, variables=variables), seconds=60.0 + 20.0 * ranks * len(jobs))
    assert codes == [0] * ranks, "\n".join(printed)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from common.cluster.environment import find_process
    from common.config.load import build_config
    from common.config.resolve import resolve_mode
    from common.errors import GPT2Error
    from common.training.log import start_log
    from torch_gpt2.evaluate import evaluate
    from torch_gpt2.train import train

    ports, jobs = json.loads(sys.argv[1])
    for port, tree in zip(ports, jobs, strict=True):
        process = find_process(os.environ | {"MASTER_PORT": str(port)})
        start_log(rank=process.rank)
        mode = tree.pop("run_mode", "train")
        try:
            config = resolve_mode(build_config(tree), mode, world_size=process.world_size)
            {"train": train, "eval": evaluate}[mode](config, process)
        except GPT2Error as error:
            print(f"error: {error}")
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

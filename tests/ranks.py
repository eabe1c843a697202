"""Several ranks on this machine: every job in turn, each rank a process that goes through all of them.

    run_ranks(2, [job, job])      starts ``python tests/ranks.py`` once, which becomes two ranks
                                  (fork) when it has imported the framework
    start_ranks(2, [job, job])    starts it twice, for tests that meddle with single ranks

A job is the tree of a configuration, with "run_mode" where that is not train, and "watched" where
it has a watch of its own. With "ranks" it is for the first ranks only. No rank begins a job before
all have ended the last one. One start serves many jobs, and
all ranks, since importing the framework takes longer than they do. All jobs of a start have one
backend; on mindspore its scheduler is started too, and each rank by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Job = dict[str, Any]
Process = subprocess.Popen[str]
SCHEDULER = (sys.executable, "-c", "import mindspore.communication; mindspore.communication.init()")
_schedulers: dict[int, subprocess.Popen[bytes]] = {}
"""By the process number of rank 0."""


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.count(random.SystemRandom().randrange(2_500))


def free_port() -> int:
    """Below those that the system gives to connections (32768 and above), since a job's is chosen
    long before it is used. Each worker of a suite has numbers of its own, from a random one on.
    """
    while True:
        port = 20_000 + 2_500 * (_WORKER % 4) + next(_ports) % 2_500
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Variables that torchrun sets, and one thread."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPT2_")}
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    names |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return clean | names | place | {"OMP_NUM_THREADS": "1"}


def _start(argument: list[Any], variables: Mapping[str, str], **options: Any) -> Process:
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(argument)], cwd=ROOT, env=variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options,
    )  # fmt: skip


def start_ranks(
    ranks: int,
    jobs: Sequence[Job],
    *,
    other: dict[int, Sequence[Job]] | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[Process]:
    """The processes of ``ranks`` ranks, by rank. other: ranks that are given other jobs. variables:
    more of the environment.
    """
    # one a job: a rank that is early must not meet the group of the job before
    ports = [free_port() for _ in jobs]
    more = dict(variables or {})
    scheduler = None
    if jobs[0].get("backend") == "mindspore" and ranks > 1:
        more |= {"MS_WORKER_NUM": str(ranks), "MS_SCHED_HOST": "127.0.0.1", "GLOG_v": "3"}
        more["MS_SCHED_PORT"] = str(free_port())
        scheduler = subprocess.Popen(SCHEDULER, env=os.environ | more | {"MS_ROLE": "MS_SCHED"})
        more["MS_ROLE"] = "MS_WORKER"
    processes = []
    for rank in range(ranks):
        environment = rank_environment(rank, ranks, ports[0]) | more | {"MS_NODE_ID": str(rank)}
        processes.append(_start([ports, list((other or {}).get(rank, jobs))], environment))
    if scheduler is not None:
        _schedulers[processes[0].pid] = scheduler
    return processes


def end_ranks(processes: list[Process], *, seconds: float = 120.0) -> tuple[list[int], list[str]]:
    """Exit codes and what was printed, by rank; no process is left."""
    try:
        printed = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in [*processes, *filter(None, [_schedulers.pop(processes[0].pid, None)])]:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], printed


def run_ranks(
    ranks: int,
    jobs: Sequence[Job],
    *,
    variables: Mapping[str, str] | None = None,
    watched: str = "",
    seconds: float = 20.0,
) -> None:
    """Start and wait. Every rank must succeed. watched: module of tests/ whose ``watch`` leaves ``watched_RANK.json``
    of each rank beside its output, such as message_counters. seconds: of the time limit, by rank and job.
    """
    # its threads do not outlive a fork; it compiles a graph for each job
    if jobs[0].get("backend") == "mindspore":
        processes = start_ranks(ranks, jobs, variables=variables)
        codes, texts = end_ranks(processes, seconds=120.0 + 3 * seconds * ranks * len(jobs))
        assert codes == [0] * ranks, "\n".join([str(codes), *texts])
        return
    ports = [free_port() for _ in jobs]
    environment = rank_environment(0, ranks, ports[0]) | dict(variables or {})
    words = [ports, list(jobs), ranks, watched]
    process = _start(words, environment, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=60.0 + seconds * ranks * len(jobs))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # no rank is left
    assert process.returncode == 0, printed


def main() -> None:
    sys.path.insert(0, str(ROOT))
    ports, jobs, *several = json.loads(sys.argv[1])
    if not several:
        go_through(ports, jobs)
        import_module("common.interrupts").end_process(0)
    # imported once, and not by each rank, whose first optimizer asks for the second of these
    for name in ("torch_gpt2.train", "torch._dynamo"):
        import_module(name)
    if any(job["train"].get("compile") for job in jobs):
        import_module("torch._inductor.compile_fx")
    if any(job.get("engine") == "deepspeed" for job in jobs) and jobs[0].get("device") == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import_module("deepspeed")
    ranks, watched = several
    fork = multiprocessing.get_context("fork")
    meet = fork.Barrier(ranks).wait

    def go(rank: int) -> None:
        os.environ.update(rank_environment(rank, ranks, ports[0]))
        go_through(ports, jobs, watched, meet)

    children = [fork.Process(target=go, args=(rank,)) for rank in range(ranks)]
    for child in children:
        child.start()
    while (alive := [child for child in children if child.is_alive()]) and not any(
        child.exitcode for child in children
    ):
        multiprocessing.connection.wait([child.sentinel for child in alive])
    for child in children:  # where one has failed, the others may tell why, but would wait for it
        child.join(10.0)
        child.kill()
    sys.exit(int(any(child.exitcode for child in children)))


def go_through(ports: list[int], jobs: list[Job], watched: str = "", meet: Callable[[], int] = lambda: 0) -> None:
    from common.backends import make_run
    from common.cluster.environment import find_process
    from common.config.load import build_config
    from common.errors import GPT2Error
    from common.log import start_log

    package = {"mindspore": "mindformers_gpt2"}.get(jobs[0].get("backend", ""), "torch_gpt2")
    for port, tree in zip(ports, jobs, strict=True):
        meet()
        rank, ranks = int(os.environ["RANK"]), tree.pop("ranks", int(os.environ["WORLD_SIZE"]))
        if rank >= ranks:
            continue
        process = find_process(rank_environment(rank, ranks, port))
        start_log(rank=process.rank)
        mode, watch = tree.pop("run_mode", "train"), tree.pop("watched", watched)
        note = Path(tree["output_dir"]) / f"watched_{process.rank}.json"
        try:
            run = {"train": "train", "eval": "evaluate"}[mode]
            with import_module(f"tests.{watch}").watch(note) if watch else contextlib.nullcontext():
                made = make_run(build_config(tree), mode, process)
                getattr(import_module(f"{package}.{run}"), run)(*made, process)
        except GPT2Error as error:
            print(f"error: {error}")
            import_module("common.interrupts").end_process(error.exit_code)


if __name__ == "__main__":
    main()

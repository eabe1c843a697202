"""An ``srun`` for machines without Slurm, to put first on PATH.

It does what srun(1) documents: it starts the tasks of a step with Slurm's variables. With
``--kill-on-bad-exit=1`` the first task that fails ends the others. Its nodes are names for this
machine. The first one resolves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NODES = ("localhost", "localhost2", "localhost3", "localhost4")


def put_on_path(folder: Path) -> str:
    """Write ``srun`` into the folder and return a PATH that finds it first."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "srun"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def main(words: list[str]) -> int:
    """Run the step and return the highest exit code of its tasks, as srun does."""
    options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    command = words[next(place for place, word in enumerate(words) if not word.startswith("--")) :]
    nodes = int(os.environ["SLURM_NNODES"])
    count = int(options.get("ntasks", os.environ["SLURM_NTASKS"]))
    tasks = [subprocess.Popen(command, env=variables_of(task, count, nodes)) for task in range(count)]

    def forward(number: int, _: object) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    while any(task.poll() is None for task in tasks):
        failed = [task for task in tasks if task.returncode]
        if failed and options.get("kill-on-bad-exit") == "1":
            for task in tasks:
                task.kill()
        time.sleep(0.05)
    # a task that a signal has ended counts with 128 and the signal's number
    return max(128 - code if code < 0 else code for code in (task.returncode for task in tasks))


def variables_of(task: int, tasks: int, nodes: int) -> dict[str, str]:
    """Return the environment of a task. Tasks are dealt to nodes in blocks, Slurm's default."""
    each = tasks // nodes
    names = ",".join(NODES[:nodes])
    counts = f"{each}(x{nodes})" if nodes > 1 else str(each)
    task_variables = {"PROCID": task, "LOCALID": task % each, "NODEID": task // each}
    job = {"NTASKS": tasks, "NNODES": nodes, "JOB_NODELIST": names}
    step = {"ID": 0, "NODELIST": names, "NUM_NODES": nodes, "NUM_TASKS": tasks}
    of_step = {f"STEP_{name}": value for name, value in step.items()}
    found = task_variables | job | of_step | {"STEP_TASKS_PER_NODE": counts}
    own = {f"SLURM_{name}": str(value) for name, value in found.items()}
    return {**os.environ, **own, "SLURMD_NODENAME": NODES[task // each]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A process of the project dies with the one that started it, also where nothing was left that
could end it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common.cluster.rank_environment import SCHEDULER
from tests.run_scripts import clean_environment, pids_with, wait_until

ROOT = Path(__file__).resolve().parents[3]


def start(program: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=clean_environment(PYTHONPATH=str(ROOT), **variables),
    )


def killed(process: subprocess.Popen[bytes], victims: Callable[[], list[int]]) -> None:
    """Kill it when its victims live; they are gone soon after."""
    wait_until(victims, "its children")
    process.kill()
    process.wait()
    wait_until(lambda: not victims(), "the end of its children", seconds=5)


def test_programs_of_others_die_with_the_tool(tmp_path: Path) -> None:
    program = (
        "import sys; from common.processes.programs import run_program; run_program(['sleep',"
        " sys.argv[1]], 60)"
    )
    (tmp_path / "sleep").write_text(
        f"#!{sys.executable}\nimport time; time.sleep(60)  # every word of a tool's is taken\n"
    )
    (tmp_path / "sleep").chmod(0o755)
    mark = f"60.{os.getpid()}"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    tool = start(program, mark, PATH=path)
    killed(tool, lambda: [pid for pid in pids_with(mark) if pid != tool.pid])


LAUNCHER = """
import sys
from pathlib import Path
from common.cluster.rank_environment import SCHEDULER
from common.launcher.supervisor import Job, run_attempt
from common.launcher.rank_process import ProcessSpec
rank = ProcessSpec(
    rank=0,
    command=(sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]),
    environment={},
)
scheduler = ProcessSpec(
    rank=-1,
    command=(*SCHEDULER, sys.argv[1]),
    environment={"MS_ROLE": "MS_SCHED"},
    name="scheduler",
)
run_attempt(Job(children=(rank, scheduler), log_folder=Path(sys.argv[1]), stall_limit=600))
"""


def test_mindspores_scheduler_dies_with_launcher_and_guard(tmp_path: Path) -> None:
    """Start a stand-in for MindSpore whose meeting takes for ever. The guard goes first, so that it
    ends nobody.
    """
    package = tmp_path / "mindspore"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "communication.py").write_text(
        "import pathlib, time\ndef init():\n    print('meeting', flush=True); time.sleep(600)\n"
    )
    log = tmp_path / "mf_parallel_scheduler" / "mindformer.log"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        cwd=ROOT,
        env=clean_environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"),
        stdout=subprocess.DEVNULL,
    )
    scheduler: list[int] = []
    try:
        wait_until(lambda: log.exists() and "meeting" in log.read_text(), "the scheduler")
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        guards = [pid for pid, command in commands.items() if "guard.py" in command]
        scheduler = [pid for pid, command in commands.items() if SCHEDULER[2] in command]
        assert len(guards) == len(scheduler) == 1
        for pid in (*guards, launcher.pid):
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: not set(scheduler) & set(pids_with(str(tmp_path))),
            "the end of the scheduler",
            seconds=5,
        )
    finally:
        launcher.kill()
        launcher.wait()
        for pid in pids_with(str(tmp_path)):  # the rank, of which nothing has asked the kernel
            os.kill(pid, signal.SIGKILL)

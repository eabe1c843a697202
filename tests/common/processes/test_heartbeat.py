"""Messages of a rank to its launcher, and how the launcher reads them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.cluster.rank_environment import SCHEDULER
from common.launcher.rank_process import ProcessSpec, RankProcess, RankState, stalled_ranks
from common.processes.process_tree import Descendants
from tests.run_scripts import pids_with, wait_until

ROOT = Path(__file__).resolve().parents[3]
START = "import os, subprocess, sys; from common.processes.heartbeat import beat, start_heartbeat; "


def run(
    program: str, launcher: int | str | None = os.getpid(), pipe: str | None = None
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a program with a heartbeat, and return what it has told. pipe: the number it is given."""
    reading, writing = os.pipe()
    variables = {"GPT2_LAUNCHER_PID": launcher, "GPT2_HEARTBEAT_FD": pipe or writing}
    done = subprocess.run(
        [sys.executable, "-c", START + program],
        cwd=ROOT,
        env={**os.environ, **{name: str(value) for name, value in variables.items() if value}},
        pass_fds=[writing],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(writing)
    with os.fdopen(reading) as file:
        return done, file.read()


def told(program: str) -> str:
    done, text = run(program)
    assert done.returncode == 0, done.stderr
    return text


def test_beats_and_signs_of_life() -> None:
    beats = "beat(3, 'reading data'); beat(3, 'computing')"
    lines = told(f"import time; start_heartbeat(); {beats}; time.sleep(.5)").splitlines()
    assert [line for line in lines if line != "alive"] == ["3 reading data", "3 computing"]
    assert "alive" in lines


def test_children_of_a_rank_do_not_speak_for_it() -> None:
    """Neither by the environment nor by the open pipe, started by exec or by fork."""
    child = (
        START + "import sys; pipe = sys.argv[1]; start_heartbeat(); beat(1, 'by exec');"
        " print(os.path.exists('/proc/self/fd/' + pipe))"
    )
    program = f"""
pipe = os.environ["GPT2_HEARTBEAT_FD"]
start_heartbeat()
subprocess.run([sys.executable, "-c", {child!r}, pipe], check=True, close_fds=False)
pid = os.fork()
if pid == 0:
    beat(2, "by fork")
    print(os.path.exists("/proc/self/fd/" + pipe), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    done, text = run("\n" + program)
    assert done.returncode == 0, done.stderr
    assert set(text.splitlines()) <= {"alive"}
    assert done.stdout.split() == ["False", "False"]


def test_the_kernel_is_asked_to_end_the_rank_with_its_launcher(tmp_path: Path) -> None:
    """As MindSpore's scheduler does, here a stand-in, which must not outlive a killed launcher."""
    ask = "number = c.c_int(); c.CDLL(None).prctl(2, c.byref(number)); print(number.value)"
    package = tmp_path / "mindspore"
    package.mkdir()
    (package / "__init__.py").touch()
    # PR_GET_PDEATHSIG of <linux/prctl.h>
    (package / "communication.py").write_text(f"import ctypes as c\ndef init():\n    {ask}\n")
    done, _ = run(f"sys.path.insert(0, {str(tmp_path)!r}); {SCHEDULER[2]}")
    assert done.stdout.split() == [str(int(signal.SIGKILL))], done.stderr


@pytest.mark.parametrize(
    "call", ["processes.process_tree import run_program", "launcher.host_list import run_over_ssh"]
)
def test_programs_of_others_die_with_the_tool(tmp_path: Path, call: str) -> None:
    """Among them ssh, here a stand-in, without which the command there loses its terminal."""
    mark, ssh, name = f"60.{os.getpid()}", tmp_path / "ssh", call.split()[-1]
    ssh.write_text('#!/bin/sh\nexec sleep "$5"\n')
    ssh.chmod(0o755)
    words = "'host', mark" if "ssh" in name else "['sleep', mark], 60"
    program = f"from common.{call}; import os; mark = os.environ['MARK']; {name}({words})"
    more = {"MARK": mark, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    tool = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **more})
    wait_until(lambda: pids_with(mark), "its child")
    tool.kill()
    tool.wait()
    wait_until(lambda: not pids_with(mark), "the end of its child", seconds=5)


def test_a_rank_whose_launcher_has_gone_ends_at_once() -> None:
    done, _ = run("start_heartbeat(); print('went on')", launcher=1)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the launcher of this rank, process 1, is gone" in done.stderr


@pytest.mark.parametrize(
    "launcher, pipe", [("", "x"), ("own", "x"), ("", "77"), ("x", "77"), ("own", "77"), ("own", "1"), ("own", "1" * 10)]
)
def test_a_process_that_was_not_launched_does_nothing(launcher: str, pipe: str) -> None:
    """77 is not an open file, and 1 is made a file that is not a pipe."""
    program = """
import tempfile, threading
file = tempfile.TemporaryFile()
os.dup2(file.fileno(), 1)
start_heartbeat()
beat(1, "computing")
assert threading.active_count() == 1
assert os.fstat(1).st_size == 0
"""
    done, _ = run("\n" + program, os.getpid() if launcher == "own" else launcher, pipe)
    assert done.returncode == 0, done.stderr


def test_a_full_pipe_does_not_hold_the_rank_up() -> None:
    """Nobody reads before it has ended."""
    # under load the sign of life finds no room any more
    assert "0 computing" in told("start_heartbeat(); [beat(n, 'computing') for n in range(100000)]").splitlines()


def test_the_launcher_reads_lines_however_they_come(tmp_path: Path) -> None:
    """The rank sends what is written into a named pipe."""
    os.mkfifo(tmp_path / "pipe")
    command = ("bash", "-c", f"exec cat {tmp_path}/pipe >&$GPT2_HEARTBEAT_FD")
    process = RankProcess(ProcessSpec(rank=2, command=command, environment={}), tmp_path, "")
    began = time.monotonic()

    def read(text: bytes, after: float) -> RankState:
        """Return the state a second after the launcher has read a text."""
        os.write(writing, text)
        time.sleep(0.3)
        process.read_heartbeat(began + after)
        return process.state(began + after + 1)

    with Descendants(10.0) as descendants:
        process.start(descendants, {})
        first = process.state(time.monotonic() + 10)
        writing = os.open(tmp_path / "pipe", os.O_WRONLY)
        alive = read(b"alive\n7 reading da", 20)
        told = read(b"ta\nrubbish\n\xff\xfe\n", 30)
        later = read(b"alive\n", 40)
        os.close(writing)
    assert (first.step, first.silent) == (-1, None) and first.idle == pytest.approx(10, abs=1)
    assert (alive.step, alive.silent) == (-1, 1.0) and alive.idle == pytest.approx(21, abs=1)
    assert (told.step, told.doing, told.idle, told.silent) == (7, "reading data", 1.0, 1.0)
    assert (later.idle, later.silent) == (11.0, 1.0)
    assert later.process_state in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING)
    assert process.state(time.monotonic()).process_state == ""
    process.close()


def rank(number: int, step: int, doing: str = "computing", **more: Any) -> RankState:
    known = {"idle": 60.0, "silent": 1.0, "process_state": psutil.STATUS_SLEEPING, **more}
    return RankState(rank=number, name="", log="", step=step, doing=doing, **known)


STOPPED = {"process_state": psutil.STATUS_STOPPED}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([rank(0, 5), rank(1, 5, **STOPPED), rank(2, 4)], [1]),
        ([rank(0, 5), rank(1, 5, silent=45.0), rank(2, 4)], [1]),
        ([rank(0, 5, silent=45.0), rank(1, 5, silent=45.0, **STOPPED)], [1]),
        ([rank(0, 5), rank(1, 4, "saving"), rank(2, 5)], [1]),
        ([rank(0, 5), rank(1, 5, "reading data"), rank(2, 5, "reading data")], [1, 2]),
        ([rank(0, 5), rank(1, -1, "starting")], [1]),
        ([rank(0, 5, "saving"), rank(1, 5, "validating")], [0, 1]),
        ([rank(0, 5), rank(1, 5)], [0, 1]),
    ],
)
def test_the_stalled_ranks_are_blamed(states: list[RankState], expected: list[int]) -> None:
    assert [state.rank for state in stalled_ranks(states)] == expected

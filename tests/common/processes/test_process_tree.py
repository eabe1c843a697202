"""Descendants of this process, compared with /proc, also those whose parent has ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.processes import process_tree
from common.processes.process_tree import adopted_orphans, end_all, living, reap

LEAVE = (
    "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL,"
    " start_new_session=True).pid)"
)


def stat(pid: int) -> tuple[int, str]:
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return int(parent), state


def test_the_table_is_that_of_the_kernel() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    table = process_tree._processes()
    assert table[sleeper.pid][0] == table[dead.pid][0] == os.getpid() == stat(sleeper.pid)[0]
    assert (table[dead.pid][1], stat(dead.pid)[1]) == (psutil.STATUS_ZOMBIE, "Z")
    assert sleeper.pid in living(()) and dead.pid not in living(())
    assert sleeper.pid not in living((sleeper.pid,))
    sleeper.kill()
    sleeper.wait()
    dead.wait()


def test_an_orphan_in_a_session_of_its_own_is_found_and_ended() -> None:
    with adopted_orphans() as before:
        orphan = int(
            subprocess.run(
                [sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, check=True, timeout=60
            ).stdout
        )
        assert orphan in living(before)
        assert end_all((), before, 10.0) == []
        reap(before)
    assert not psutil.pid_exists(orphan)


def test_processes_that_cannot_be_read_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide processes as a /proc mounted with hidepid=1 does."""

    def hidden(process: psutil.Process) -> str:
        if process.pid != os.getpid():
            raise psutil.AccessDenied(process.pid)
        return psutil.STATUS_RUNNING

    monkeypatch.setattr(psutil.Process, "status", hidden)
    assert set(process_tree._processes()) == {os.getpid()}


def test_processes_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "living", lambda before: [2**30])
    began = time.monotonic()
    assert end_all((), (), 0.1) == [2**30] and time.monotonic() - began < 5

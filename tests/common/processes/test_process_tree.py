"""Descendants of this process, compared with /proc, also those whose parent has ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.processes.process_tree import Descendants

LEAVE = (
    "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL,"
    " start_new_session=True).pid)"
)


def stat(pid: int) -> tuple[int, str]:
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return int(parent), state


def test_descendants_are_those_of_the_kernel_and_none_is_left(tmp_path: Path) -> None:
    """Among them an orphan in a session of its own; an earlier child is not one of them."""
    earlier = subprocess.Popen(["sleep", "60"])
    with Descendants(10.0) as descendants:
        sleeper, dead = descendants.start(["sleep", "60"]), descendants.start(["true"])
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        with (tmp_path / "orphan").open("wb") as file:
            descendants.start([sys.executable, "-c", LEAVE], stdout=file).wait(timeout=60)
        orphan = int((tmp_path / "orphan").read_text())
        assert stat(sleeper.pid)[0] == stat(orphan)[0] == os.getpid()
        assert stat(dead.pid) == (os.getpid(), "Z")
        assert sorted(descendants.living()) == sorted([sleeper.pid, orphan])
    assert descendants.undead == [] and sleeper.returncode == -9 and dead.returncode == 0
    assert not psutil.pid_exists(orphan) and earlier.poll() is None
    earlier.kill()
    earlier.wait()


def test_processes_that_do_not_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Descendants, "living", lambda self: [2**30])
    began = time.monotonic()
    with Descendants(0.1) as descendants:
        pass
    assert descendants.undead == [2**30] and time.monotonic() - began < 5

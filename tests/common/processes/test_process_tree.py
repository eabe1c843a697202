"""Descendants of this process, compared with /proc, and their cores, from an invented /sys."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.processes.process_tree import Descendants, cores_of_ranks, in_order, share

LEAVE = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, start_new_session=True).pid)"


def stat(pid: int) -> tuple[int, str]:
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return int(parent), state


def test_descendants_are_those_of_the_kernel_and_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them an orphan in a session of its own; an earlier child is not one of them. No cores, no mask."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pytest.fail("a mask") if cores else None)
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


def write_tree(system: Path, places: dict[int, tuple[int, int]]) -> None:
    for number, (package, core) in places.items():
        folder = system / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")


def test_threads_of_a_core_and_cores_of_a_package_are_neighbours(tmp_path: Path) -> None:
    """Two packages of two cores of two threads, numbered as Linux does: first all first threads, packages in turn."""
    write_tree(tmp_path, {number: (number % 2, number // 2 % 2) for number in range(8)})
    assert in_order(range(8), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert in_order({5, 1, 0, 7}, tmp_path) == [0, 1, 5, 7]
    assert in_order({9, 0, 2}, tmp_path) == [0, 2, 9], "one without a place"


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        (8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, 3, [(0, 1, 2), (3, 4, 5), (6, 7)]),
        (5, 4, [(0, 1), (2,), (3,), (4,)]),
        (2, 2, [(0,), (1,)]),
        (2, 3, [(), (), ()]),
    ],
)
def test_shares(cores: int, ranks: int, expected: list[tuple[int, ...]]) -> None:
    assert share(list(range(cores)), ranks) == expected


def test_only_cores_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert set(cores_of_ranks(1)[0]) == allowed
    assert cores_of_ranks(len(allowed) + 1) == [()] * (len(allowed) + 1)

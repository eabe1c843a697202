"""Ranks that fail in every way, as small programs without a framework: who is blamed, in what time,
and that nobody is left.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.cluster.places import RankPlacement
from common.doctor.allreduce import (
    MARK,
    STAGES,
    AllReduceTrial,
    TrialRank,
    TrialRanks,
    judge,
    watch,
)
from common.doctor.report import Check, State

ROOT = Path(__file__).resolve().parents[3]
RESULT = {"first": 0.5, "seconds": 0.01, "ready": 1.0, "bytes": 10**9}
# Reports the stages of $STAGES, does $THEN, and stays as a rank of the doctor does. The heartbeat
# ties its life to the doctor's.
PROGRAM = f"""
import json, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.processes.heartbeat import start_heartbeat
start_heartbeat()
for stage in json.loads(os.environ["STAGES"]):
    sys.stdout.write({MARK!r} + json.dumps({{"stage": stage, **{RESULT!r}}}) + "\\n")
    sys.stdout.flush()
exec(os.environ.get("THEN", ""))
time.sleep(60)
"""


def make_trial(world: int, limit: float) -> AllReduceTrial:
    places = [
        RankPlacement(rank=rank, device_id=rank + 4, local_rank=rank, host="10.0.0.1")
        for rank in range(world)
    ]
    return AllReduceTrial(
        places=places, backend="torch", communication="gloo", address="10.0.0.1:29500", limit=limit
    )


def run(folder: Path, ranks: Mapping[int, tuple[str, str]], limit: float = 30) -> Check:
    """Each rank: the last stage that it reports, and what it does then. The limit counts from when
    all are so far, whatever the load.
    """
    environments = {
        rank: {"STAGES": json.dumps(STAGES[1 : STAGES.index(last) + 1]), "THEN": then}
        for rank, (last, then) in ranks.items()
    }
    local = TrialRanks([sys.executable, "-c", PROGRAM], environments, folder)
    with local:
        deadline = time.monotonic() + 60
        while (
            any(is_short_of(ranks[state.rank][0], state) for state in local.states())
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        check = watch(local, make_trial(sum(rank >= 0 for rank in ranks), limit))
    for pid in local.pids().values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return check


def is_short_of(stage: str, state: TrialRank) -> bool:
    return state.code is None and STAGES.index(state.stage) < STAGES.index(stage)


def test_all_reduced(tmp_path: Path) -> None:
    check = run(tmp_path, {0: ("reduced", ""), 1: ("reduced", "")})
    # 1 GB in 10 ms: each of two ranks sends 2 * (1 / 2) of it
    assert check.state is State.OK
    assert (
        "2 ranks, gloo: the sum is right; 954 MiB in 10.0 ms (100.00 GB/s a rank), the first in 500"
        " ms" in check.found
    )


def test_a_rank_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    ranks = {
        0: ("connected", ""),
        1: ("started", "raise ImportError('no such library')"),
        2: ("connected", ""),
    }
    check = run(tmp_path, ranks)
    assert check.state is State.ERROR
    assert check.found.startswith(
        "rank 1 (device 5 of 10.0.0.1) ended with exit code 1 after 'started'\n"
    )
    assert check.found.endswith("ImportError: no such library")
    assert str(tmp_path / "rank_1.log") in check.found


def test_a_rank_that_ends_too_early_with_0_has_failed(tmp_path: Path) -> None:
    assert (
        "rank 0 (device 4 of 10.0.0.1) ended with exit code 0"
        in run(tmp_path, {0: ("group made", "sys.exit(0)")}).found
    )


def test_a_killed_rank_is_blamed_before_those_that_lost_their_connection(tmp_path: Path) -> None:
    kill = "time.sleep(0.5); os.kill(os.getpid(), 9)"
    check = run(tmp_path, {0: ("group made", "sys.exit(1)"), 1: ("group made", kill)})
    assert (
        "rank 1 (device 5 of 10.0.0.1) was killed by SIGKILL after 'group made'; 1 more failed"
        in check.found
    )


def test_a_stopped_rank_is_named_although_all_are_as_far(tmp_path: Path) -> None:
    stop = "os.kill(os.getpid(), 19)"
    check = run(
        tmp_path, {0: ("connected", ""), 1: ("connected", stop), 2: ("connected", "")}, limit=1
    )
    assert check.found.startswith(
        "rank 1 (device 5 of 10.0.0.1) did not answer within 1 s: stopped by a signal"
    )


def test_a_rank_that_never_connected_is_named_with_its_stack(tmp_path: Path) -> None:
    hang = "def connecting():\n    time.sleep(60)\nconnecting()"
    check = run(
        tmp_path, {0: ("connected", ""), 1: ("imported", hang), 2: ("connected", "")}, limit=1
    )
    assert check.found.startswith(
        "rank 1 (device 5 of 10.0.0.1) did not answer within 1 s: not connected to 10.0.0.1:29500;"
        " the other 2 got"
    )
    assert "in connecting" in check.found


def test_all_hang_together(tmp_path: Path) -> None:
    check = run(tmp_path, {0: ("group made", ""), 1: ("group made", "")}, limit=1)
    assert check.found.startswith("none of 2 ranks within 1 s: hung in the all-reduce itself")


def test_a_scheduler_that_dies_is_the_cause(tmp_path: Path) -> None:
    check = run(tmp_path, {-1: ("imported", "sys.exit('address in use')"), 0: ("imported", "")})
    assert check.found.startswith("MindSpore's scheduler ended with exit code 1 after 'imported'")
    assert check.found.endswith("address in use")


def test_ranks_die_with_a_doctor_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from common.doctor.allreduce import TrialRanks
environment = {{"STAGES": '["started"]'}}
command = [sys.executable, "-c", {PROGRAM!r}]
with TrialRanks(command, {{0: environment}}, Path({str(tmp_path)!r})) as ranks:
    while not ranks.states()[0].stage:
        time.sleep(0.05)
    print(ranks.pids()[0], flush=True)
    time.sleep(60)
"""
    doctor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert doctor.stdout is not None
    pid = int(doctor.stdout.readline())
    doctor.kill()
    doctor.wait()
    doctor.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z"):
                return  # dead, and nobody here collects it
        except FileNotFoundError:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the rank outlived its doctor")


def test_a_lost_host_comes_before_what_failed_because_of_it() -> None:
    seen = [TrialRank(rank=0, stage="connected"), TrialRank(rank=1, stage="connected")]
    left = "10.0.0.2 (ranks 2-3) has left"
    check = judge(seen, make_trial(4, 5), [left])
    assert (check.state, check.found) == (State.ERROR, left)
    check = judge(
        [seen[0], TrialRank(rank=1, stage="connected", code=1, ended=3.0)], make_trial(4, 5), [left]
    )
    assert (
        check.found
        == f"{left}\nrank 1 (device 5 of 10.0.0.1) ended with exit code 1 after 'connected'"
    )


def test_ranks_of_which_nothing_was_heard_are_named() -> None:
    check = judge([TrialRank(rank=0, stage="connected")], make_trial(3, 5))
    assert check.found.startswith(
        "rank 1 (device 5 of 10.0.0.1), rank 2 (device 6 of 10.0.0.1) did not answer within 5 s:"
        " its program"
    )


def test_a_wrong_sum_names_the_rank() -> None:
    wrong = TrialRank(rank=1, stage="wrong sum", result={"found": 2.0, "expected": 3.0})
    check = judge([TrialRank(rank=0, stage="reduced"), wrong], make_trial(2, 5))
    assert check.state is State.ERROR
    assert check.found == "rank 1 (device 5 of 10.0.0.1) got 2.0 instead of 3.0"

"""Ranks of a trial that fail, as small programs without a framework: who is blamed, and the advice.
Real ranks: tests/tools/test_doctor.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from common.cluster.places import Placement, RankPlacement
from common.doctor.allreduce import MARK, STAGES, AllReduceTrial, judge, try_all_reduce
from common.doctor.report import Check, State
from common.launcher.rank_process import ProcessSpec
from common.launcher.supervisor import Job, Outcome

ROOT = Path(__file__).resolve().parents[3]
SPEED = {"first": 0.5, "seconds": 0.01, "ready": 1.0, "bytes": 10**9}
# reports the stages of its first argument, and does its second
PROGRAM = f"""
import json, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.processes.heartbeat import beat, start_heartbeat
start_heartbeat()
for number, stage in enumerate(json.loads(sys.argv[1]), 1):
    print({MARK!r} + json.dumps({{"stage": stage, "facts": [{{"speed": {SPEED!r}}}] * 2}}))
    beat(number, stage)
exec(sys.argv[2])
"""
STAY = "time.sleep(60)"


def make_trial(*hosts: str) -> AllReduceTrial:
    places = tuple(
        RankPlacement(rank=rank, device_id=rank + 4, local_rank=rank, host=host) for rank, host in enumerate(hosts)
    )
    everywhere = Placement(all=places, own_host=hosts[0], master=hosts[0])
    return AllReduceTrial(places=everywhere, communication="gloo", address="10.0.0.1:29500")


def run(folder: Path, *ranks: tuple[str, str], limit: float = 30) -> Check:
    """Last check of a trial. Each rank: the last stage that it reports, and what it does then."""
    children = []
    for rank, (last, then) in enumerate(ranks):
        stages = json.dumps(STAGES[1 : STAGES.index(last) + 1])
        command = (sys.executable, "-c", PROGRAM, stages, then)
        device = {"DEVICE_ID": str(rank + 4)}
        children.append(ProcessSpec(rank=rank, command=command, environment=device))
    job = Job(children=tuple(children), log_folder=folder, stall_limit=limit)
    return try_all_reduce(job, make_trial(*["10.0.0.1"] * len(ranks)))[-1]


def test_all_reduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 GB in 10 ms: each of two ranks sends 2 * (1 / 2) of it. Standard output is the report's."""
    check = run(tmp_path, ("reduced", ""), ("reduced", ""))
    assert (check.state, check.found) == (
        State.OK,
        "2 ranks, gloo: the sum is right; 954 MiB in 10.0 ms (100.00 GB/s a rank), the first in 500"
        " ms, group ready after 1.0 s",
    )
    assert capsys.readouterr().out == ""


ERROR = "fix the error in its log"


@pytest.mark.parametrize(
    ("ranks", "limit", "found", "remedy"),
    [
        ([("connected", STAY), ("started", "raise ImportError('no such library')")], 30,
            ["rank 1 (device 5) ended with exit code 1", "ImportError: no such library"], ERROR),
        ([("group made", "sys.exit(0)")], 30,
            ["rank 0 (device 4 of 10.0.0.1) ended too early, after 'group made'"], ERROR),
        ([("connected", STAY), ("imported", "os.kill(os.getpid(), 15)")], 30,
            ["rank 1 (device 5) was killed by signal 15 (SIGTERM"], ERROR),
        ([("connected", STAY), ("imported", f"def connecting(): {STAY}\nconnecting()")], 3,
            ["stalled for 3 s (--time_limit)", "rank 1 (device 5) has made no",
             "its last report was step 2, imported", "in connecting"],
            "every host can reach 10.0.0.1:29500, past firewalls; GLOO_SOCKET_IFNAME"),
    ],
)  # fmt: skip
def test_the_rank_at_fault_is_named_with_the_end_of_its_log(
    tmp_path: Path, ranks: list[tuple[str, str]], limit: float, found: list[str], remedy: str
) -> None:
    check = run(tmp_path, *ranks, limit=limit)
    assert check.state is State.ERROR and remedy in check.remedy
    assert [words for words in found if words not in check.found] == [], check.found


def test_a_wrong_sum_names_the_rank() -> None:
    wrong = {"stage": "wrong sum", "found": 2.0, "expected": 3.0}
    outcome = Outcome(code=1, report="error: ...")
    [check] = judge(outcome, {0: {"stage": "group made"}, 1: wrong}, make_trial("a", "a"))
    assert check.state is State.ERROR
    assert check.found == "rank 1 (device 5 of a) got 2.0 instead of 3.0"


@pytest.mark.parametrize(
    ("ahead", "clock"),
    [(0.25, (State.OK, "within 0.250 s of a's (the furthest: b)")), (-9.0, (State.WARNING, "b is 9.0 s behind a"))],
)
def test_hosts_compare_clocks_and_versions(ahead: float, clock: tuple[State, str]) -> None:
    here: dict[str, Any] = {"speed": SPEED, "time": 100.0, "torch": "2.13"}
    there = here | {"time": 100.0 + ahead, "torch": "2.12", "x": "1"}
    last = {0: {"stage": "reduced", "facts": [here, there]}}
    checks = judge(Outcome(code=0), last, make_trial("a", "b"))
    assert [check.name for check in checks] == ["versions", "clock", "hosts", "all-reduce"]
    assert checks[0].found == "b has torch 2.12 (a: 2.13), x 1 (a: None)"
    assert (checks[1].state, checks[1].found) == clock
    assert checks[2].found == "all 2 have come"

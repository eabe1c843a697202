"""Attempts of a run: which failures are followed by another, with which pause and which line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from common.launcher import supervisor
from common.launcher.rank_process import ProcessSpec
from common.launcher.supervisor import Failure, Job, Outcome, pause, run_attempts, why_not

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from common.processes.heartbeat import beat, start_heartbeat
start_heartbeat()
number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
first, last, code = json.loads(sys.argv[1])[number]
for step in range(first, last + 1):
    beat(step, "computing")
print("attempt", number, flush=True)
sys.exit(code)
"""
"""Rank that works on steps and exits, by the triple of its attempt."""


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def run(folder: Path, attempts: list[tuple[int, int, int]], most: int) -> int:
    child = ProcessSpec(
        rank=0, command=(sys.executable, "-c", PROGRAM, json.dumps(attempts)), environment={}
    )
    job = Job(children=(child,), log_folder=folder, stall_limit=100.0)
    return run_attempts(lambda number: job, most=most, folder=folder).code


def test_attempts_until_one_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "pause", lambda failures: failures / 10)
    assert run(tmp_path, [(1, 9, 1), (6, 12, 3), (11, 20, 0)], most=2) == 0
    found = lines(tmp_path)
    assert [(line["attempt"], line["exit_code"], line["then"]) for line in found] == [
        (1, 1, "restarted"),
        (2, 3, "restarted"),
        (3, 0, "ended"),
    ]
    assert [(line["first_step"], line["last_step"]) for line in found] == [
        (1, 9),
        (6, 12),
        (11, 20),
    ]
    assert "rank 0 ended with exit code 3" in found[1]["failure"]
    logs = tmp_path / "mf_parallel0"
    for name, number in (("mindformer.log.1", 0), ("mindformer.log.2", 1), ("mindformer.log", 2)):
        text = (logs / name).read_text()
        assert f"attempt {number}\n" in text and text.count("attempt") == 1
    assert "restart 2 of 2 in 0.2 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("attempts", "most", "count", "told"),
    [
        ([(1, 9, 2)], 5, 1, "exit code 2"),
        ([(1, 1, 1)], 5, 1, "before it had finished a step"),
        ([(1, 9, 1), (6, 9, 1)], 5, 2, "step 9 failed twice"),
        ([(1, 9, 1), (6, 10, 1), (6, 11, 1)], 2, 3, "max_restarts=2 restarts are used up"),
        ([(1, 9, 143)], 5, 1, "ended"),
        # a start that fails after steps is tried again once
        ([(1, 9, 1), (6, 6, 1), (6, 20, 0)], 5, 3, "ended"),
        ([(1, 9, 1), (6, 6, 1), (6, 6, 1)], 5, 3, "step 6 failed twice"),
    ],
)
def test_failures_that_end_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempts: list[tuple[int, int, int]],
    most: int,
    count: int,
    told: str,
) -> None:
    monkeypatch.setattr(supervisor, "pause", lambda failures: 0.0)
    assert run(tmp_path, attempts, most) == attempts[-1][2]
    found = lines(tmp_path)
    assert len(found) == count and told in found[-1]["then"]


def test_a_run_without_restarts_writes_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert run(tmp_path, [(1, 9, 1)], most=0) == 1
    assert not (tmp_path / "attempts.jsonl").exists()


def test_a_lost_host_is_waited_for_even_before_the_first_step_and_at_the_same_step() -> None:
    gone = Failure(text="gone", code=1, lost_host=True)
    lost = Outcome(code=1, failure=gone, first_step=5, last_step=5)
    assert why_not(lost, [], 1) == ""
    assert why_not(lost, [lost], 2) == ""
    assert "used up" in why_not(lost, [lost], 1)
    assert [pause(number) for number in (*range(9), 10**6)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]

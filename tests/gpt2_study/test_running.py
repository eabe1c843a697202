"""Runs of a study: their order, start, end, judgement and resumption.

The runs are real processes, but small ones that write metrics in place of training.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import ConfigError
from common.run_folder import owned_folder
from gpt2_study import command
from gpt2_study.cells import PlannedCell, expand
from gpt2_study.children import (
    LAUNCHER_LOG,
    Launch,
    Where,
    judge,
    launches,
    reason_not_started,
    run_launches,
)
from gpt2_study.command import StudyRequest, missing, run_study
from gpt2_study.loading import Definition
from gpt2_study.results import State, Study, read_study
from tests.run_scripts import wait_until

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "gpt2" / "run_gpt2_tiny.yaml")
STUDY = f"""title: Seeds
base: {TINY}
settings: {{device: cpu}}
axes:
  seed: [1, 2, 3]
warmup_steps: 1
measured_steps: 2
repeats: 2
time_limit: 60
"""
RUN = f"""import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
row = dict(loss=3.0, grad_norm=1.0, step_time=0.5, data_wait=0.0, sample_hash="a", mfu=None)
rows = [json.dumps(dict(row, step=step)) for step in (1, 2, 3)]
(folder / "config.yaml").write_text("base: {TINY}")
(folder / "metrics.jsonl").write_text("\\n".join(rows) + "\\n")
"""


class Fixture:
    """A study whose cells run RUN, or what ``programs`` says for a cell."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "seeds.yaml"
        self.config.write_text(STUDY)
        self.folder = folder / "out"
        self.programs: dict[str, str] = {}
        self.started: list[str] = []

    def launches(self, planned: PlannedCell, folder: Path, where: Where) -> list[Launch]:
        name = planned.cell.id
        if "by_hand" not in folder.parts:
            self.started.append(f"{name}/{folder.name[-1]}")
        program = self.programs.get(name, RUN)
        return [Launch(command=(sys.executable, "-c", program, str(folder)))]

    def run(self, *words: str, redo: tuple[str, ...] = ()) -> Study:
        self.started.clear()
        request = StudyRequest(config=self.config, overrides=words, redo=redo, output_dir=self.folder)
        run_study(request)
        return read_study(self.folder)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    made = Fixture(tmp_path)
    monkeypatch.setattr(command, "launches", made.launches)
    # test_report.py looks at tables, plots and reports
    monkeypatch.setattr(command, "write_outcome", lambda study, folder: None)
    return made


def children() -> set[psutil.Process]:
    """Child processes of this one; earlier tests may have left helpers of libraries."""
    return {child for child in psutil.Process().children() if child.is_running()}


def states(study: Study) -> dict[str, list[State]]:
    return {found.cell.id: [each.state for each in found.repeats] for found in study.cells}


def test_rounds_alternate_their_direction(study: Fixture) -> None:
    found = study.run("repeats=3")
    forwards, backwards = ["seed1", "seed2", "seed3"], ["seed3", "seed2", "seed1"]
    rounds = enumerate((forwards, backwards, forwards), 1)
    assert study.started == [f"{name}/{index}" for index, names in rounds for name in names]
    assert states(found) == dict.fromkeys(forwards, [State.FINISHED] * 3)
    measured = found.cells[1].repeats[0].measured
    assert measured is not None
    assert (measured.step_seconds, measured.tokens_per_step) == ([0.5, 0.5], 8 * 128)
    assert found.finished and list(missing(found)) == []


def test_a_stopped_study_resumes_after_the_last_repeat(study: Fixture) -> None:
    before = children()
    for number, stop, arguments in ((signal.SIGINT, KeyboardInterrupt, ()), (signal.SIGTERM, SystemExit, (143,))):
        study.programs["seed2"] = f"import os; os.kill({os.getpid()}, {int(number)}); import time; time.sleep(60)"
        with pytest.raises(stop) as caught:
            study.run()
        assert caught.value.args == arguments and children() <= before and study.started[-1] == "seed2/1"
    assert study.started == ["seed2/1"]
    half = read_study(study.folder)
    assert (states(half)["seed1"], states(half)["seed2"]) == ([State.FINISHED], [])
    assert half.finished is None
    left = study.folder / "cells" / "seed2" / "repeat_1" / "metrics.jsonl"
    left.write_text("what the run that was cut off has left\n")
    study.programs.clear()
    found = study.run()
    assert study.started == ["seed2/1", "seed3/1", "seed3/2", "seed2/2", "seed1/2"]
    assert states(found) == dict.fromkeys(states(found), [State.FINISHED] * 2)
    assert "cut off" not in left.read_text()
    assert found.started == half.started
    study.run()
    assert study.started == []
    study.run("repeats=3")
    assert len(study.started) == 3


def test_a_cell_that_fails_or_is_refused_is_a_row_and_the_others_run(study: Fixture) -> None:
    study.config.write_text(STUDY.replace("seed: [1, 2, 3]", "parallel.model_parallel: [1, 2, 3, 4]"))
    study.programs = {
        "tp1": "import sys; print('error: the disk is gone'); sys.exit(1)",
        "tp2": "import os; os.kill(os.getpid(), 9)",
        "tp3": "pass",
    }
    found = study.run("repeats=1")
    assert study.started == ["tp1/1", "tp2/1", "tp3/1"]
    assert [state for [state] in states(found).values()] == [*[State.FAILED] * 3, State.REFUSED]
    for each, said in zip(
        found.cells, ("the disk is gone", "SIGKILL", "metrics.jsonl", "does not divide"), strict=True
    ):
        assert said in each.repeats[0].reason
        assert bool(each.repeats[0].command) is ("divide" not in said)


def test_a_time_limit_ends_a_run_with_all_that_it_started(
    study: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2_study.children._BETWEEN_SIGNALS", 0.1)
    monkeypatch.setattr("gpt2_study.children._STOP_SECONDS", 0.3)
    pids = tmp_path / "pids"
    study.programs["seed2"] = f"""import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True)
open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')
time.sleep(99)
"""
    found = study.run("time_limit=1.5")
    repeats = found.cells[1].repeats
    assert [each.state for each in repeats] == [State.TIMED_OUT]  # it would only happen again
    assert repeats[0].reason == "did not end within 1.5 s (time_limit)"
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())
    assert states(found)["seed3"] == [State.FINISHED] * 2


def test_the_folder_of_another_study_is_left_alone(study: Fixture) -> None:
    study.folder.mkdir()
    with owned_folder(study.folder), pytest.raises(ConfigError, match="another run is writing"):
        study.run()
    before = study.run("repeats=1").model_dump()
    for old, new, said in (
        ("measured_steps: 2", "measured_steps: 3", "measured_steps 2"),
        ("[1, 2, 3]", "[1, 2]", "holds the cell seed3, which"),
        ("cpu}", "cpu, train.recompute: full}", "has other settings"),
    ):
        study.config.write_text(STUDY.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            study.run()
        assert read_study(study.folder).model_dump() == before
    study.config.write_text(STUDY.replace("[1, 2, 3]", "[1, 2, 3, 4]"))
    study.run("repeats=1")
    assert study.started == ["seed4/1"]
    found = study.run("repeats=1", redo=("seed2",))
    assert study.started == ["seed2/1"] and states(found)["seed2"] == [State.FINISHED]
    with pytest.raises(ConfigError, match=r"--redo seed: no such cell; did you mean seed4\?"):
        study.run(redo=("seed",))


MEMORY, DISK = "error: out of memory: 9.00 GiB at once were asked for", "error: the disk is full"
KILLED = "error: rank 1 was killed by signal 9 (SIGKILL: out of memory?)"


@pytest.mark.parametrize(
    ("code", "more", "log", "state", "reason"),
    [
        (0, {}, "error: x", State.FINISHED, ""),
        (1, {}, MEMORY, State.OUT_OF_MEMORY, "out of memory: 9.00 GiB at once were asked for"),
        (1, {}, "torch.OutOfMemoryError: CUDA out of memory. Tried", State.OUT_OF_MEMORY, "CUDA out of memory"),
        (137, {"killed_for_memory": True}, KILLED, State.OUT_OF_MEMORY, "the kernel ended a"),
        # another's process was killed
        (1, {"killed_for_memory": True}, DISK, State.FAILED, "the disk is full"),
        (137, {}, KILLED, State.FAILED, "rank 1 was killed by signal 9"),
        (2, {}, "error: no such file", State.REFUSED, "no such file"),
        (1, {}, "", State.FAILED, "ended with exit code 1"),
    ],
)
def test_lack_of_memory_is_told_from_other_failures(
    tmp_path: Path, code: int, more: Any, log: str, state: State, reason: str
) -> None:
    (tmp_path / LAUNCHER_LOG).write_text(f"started rank 0\n{log}\nmore\n")
    found = judge(code, tmp_path, **more)
    assert found[0] is state and reason in found[1]


def test_one_launcher_that_fails_ends_those_of_the_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is not there is refused."""
    monkeypatch.setattr("gpt2_study.children._OTHERS_SECONDS", 0.3)
    sleeper, broken = (
        Launch(command=(sys.executable, "-c", f"import time; {do}")) for do in ("time.sleep(99)", "exit(3)")
    )
    before = children()
    outcome = run_launches([sleeper, broken], tmp_path, 60.0)
    assert outcome.seconds < 20 and outcome.state is State.FAILED and children() <= before
    outcome = run_launches([Launch(command=("/nowhere/srun",))], tmp_path, 9.0)
    assert (outcome.state, outcome.reason) == (State.REFUSED, "/nowhere/srun: No such file or directory")


def test_the_processes_of_a_study_that_is_killed_die_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeper = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    program = f"""import sys; from pathlib import Path
from gpt2_study.children import Launch, run_launches
run_launches([Launch(command=(sys.executable, '-c', {sleeper!r}))], Path({str(tmp_path)!r}), 60.0)
"""
    runner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    wait_until(lambda: pid.exists() and bool(pid.read_text()), "the sleeper starts")
    sleeping = psutil.Process(int(pid.read_text()))
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert sleeping.wait(timeout=20) in (None, -signal.SIGKILL)


# ---- where runs go ----


def planned(**axis: object) -> PlannedCell:
    tree = {"title": "t", "base": TINY, "settings": {"train.micro_batch_size": 2}}
    definition = Definition.model_validate(tree | {"axes": {"cell": {"a": axis}}})
    return expand(definition, ROOT / "x.yaml")[0]


def test_the_commands_are_those_of_the_launcher(tmp_path: Path) -> None:
    cell = planned(ranks=4, hosts=2)
    first, second = (" ".join(each.command) for each in launches(cell, tmp_path, Where()))
    assert " [0,2) " in first and " [2,4) " in second and " --node_rank 1" in second
    assert re.findall(r"--master \S+", first) == re.findall(r"--master \S+", second) != []
    over_ssh = " ".join(launches(cell, tmp_path, Where(hosts=("a", "b", "c")))[0].command)
    assert "--hosts a,b " in over_ssh and "--ssh" in over_ssh and " [0,2) " in over_ssh
    slurm = " ".join(launches(cell, tmp_path, Where(slurm=True))[0].command)
    assert slurm.startswith("srun --kill-on-bad-exit=1 --nodes=2 --ntasks=4 --ntasks-per-node=2 ")
    assert f"output_dir={tmp_path}" in slurm and "--run_mode train" in slurm
    peer = launches(planned(peer="transformers"), tmp_path, Where())[0].command
    assert peer[peer.index("--program") + 1].endswith("benchmarks/peers/transformers.py")


def test_why_a_cell_cannot_start_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_not_started(planned(ranks=2, hosts=2), Where(hosts=("a",))) == ("needs 2 hosts, and --hosts names 1")
    monkeypatch.setattr("shutil.which", lambda name: None)
    horovod = planned(ranks=2, **{"parallel.strategy": "horovod"})
    assert reason_not_started(horovod, Where()).startswith("parallel.strategy=horovod: horovodrun is not")

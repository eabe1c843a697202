"""Runs of a study: their order, start, end, judgement and resumption.

The runs are real processes, but small ones that write metrics in place of training.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common.errors import ConfigError
from common.run_folder import owned_folder
from common.study import command, running
from common.study.cells import PlannedCell, expand
from common.study.children import LAUNCHER_LOG, Outcome, judge, run_launches
from common.study.command import StudyRequest, run_study
from common.study.definition import Definition
from common.study.results import State, Study, read_study
from common.study.running import missing
from common.study.starting import Launch, Where, launches, reason_not_started

ROOT = Path(__file__).resolve().parents[3]
STUDY = f"""title: Seeds
base: {ROOT}/configs/gpt2/run_gpt2_tiny.yaml
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
(folder / "config.yaml").write_text("base: {ROOT}/configs/gpt2/run_gpt2_tiny.yaml")
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
        request = StudyRequest(
            config=self.config, overrides=words, redo=redo, output_dir=self.folder
        )
        run_study(request, lambda text: None)
        return read_study(self.folder)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    made = Fixture(tmp_path)
    monkeypatch.setattr(running, "launches", made.launches)
    # test_outcome.py looks at tables, plots and reports
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
    order = [f"{name}/{index}" for index in (1, 2, 3) for name in (
        backwards if index == 2 else forwards
    )]  # fmt: skip
    assert study.started == order
    assert states(found) == dict.fromkeys(forwards, [State.FINISHED] * 3)
    measured = found.cell("seed2").repeats[0].measured
    assert measured is not None
    assert (measured.step_seconds, measured.tokens_per_step) == ([0.5, 0.5], 8 * 128)
    assert found.finished and list(missing(found)) == []


@pytest.mark.parametrize(
    ("number", "stop"), [(signal.SIGINT, KeyboardInterrupt()), (signal.SIGTERM, SystemExit(143))]
)
def test_a_stopped_study_resumes_after_the_last_repeat(
    study: Fixture, number: signal.Signals, stop: BaseException
) -> None:
    end = f"import os; os.kill({os.getpid()}, {int(number)}); import time; time.sleep(60)"
    study.programs["seed2"] = end
    before = children()
    with pytest.raises(type(stop)) as caught:
        study.run()
    assert caught.value.args == stop.args and children() <= before
    assert study.started == ["seed1/1", "seed2/1"]
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


def test_redo_repeats_one_cell_and_keeps_the_others(study: Fixture) -> None:
    study.run()
    found = study.run(redo=("seed2",))
    assert study.started == ["seed2/1", "seed2/2"]
    assert states(found) == dict.fromkeys(states(found), [State.FINISHED] * 2)
    with pytest.raises(ConfigError, match=r"--redo seed: no such cell; did you mean seed3\?"):
        study.run(redo=("seed",))


def test_a_cell_that_fails_is_a_row_and_the_others_run(study: Fixture) -> None:
    study.programs = {
        "seed1": "import sys; print('error: the disk is gone'); sys.exit(1)",
        "seed2": "import os; os.kill(os.getpid(), 9)",
        "seed3": "pass",
    }
    found = study.run("train.micro_batch_size=4")
    reasons = {each.cell.id: each.repeats[0].reason for each in found.cells}
    assert states(found)["seed3"] == [State.FAILED] * 2 and "metrics.jsonl" in reasons["seed3"]
    assert reasons["seed1"] == "the disk is gone"
    assert "SIGKILL" in reasons["seed2"]
    assert states(found)["seed2"] == [State.FAILED] * 2


def test_a_refused_cell_is_a_row_and_is_not_started(study: Fixture) -> None:
    study.config.write_text(STUDY.replace("seed: [1, 2, 3]", "parallel.model_parallel: [1, 4]"))
    found = study.run()
    assert study.started == ["tp1/1", "tp1/2"]
    assert states(found) == {"tp1": [State.FINISHED] * 2, "tp4": [State.REFUSED]}
    assert "does not divide model.num_heads=6" in found.cell("tp4").repeats[0].reason


def test_a_time_limit_ends_a_run_with_all_that_it_started(
    study: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.study.children._BETWEEN_SIGNALS", 0.1)
    monkeypatch.setattr("common.study.children._STOP_SECONDS", 0.3)
    pids = tmp_path / "pids"
    study.programs["seed2"] = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'],"
        " start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(99)\n"
    )
    found = study.run("time_limit=1.5")
    repeats = found.cell("seed2").repeats
    assert [each.state for each in repeats] == [State.TIMED_OUT]  # it would only happen again
    assert repeats[0].reason == "did not end within 1.5 s (time_limit)"
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())
    assert states(found)["seed3"] == [State.FINISHED] * 2


def test_two_studies_do_not_share_a_folder(study: Fixture) -> None:
    study.folder.mkdir()
    with owned_folder(study.folder), pytest.raises(ConfigError, match="another run is writing"):
        study.run()
    assert study.started == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("measured_steps: 2", "measured_steps: 3"), "measured_steps 2"),
        (lambda text: text.replace("[1, 2, 3]", "[1, 2]"), "holds the cell seed3, which"),
        (lambda text: text.replace("cpu}", "cpu, train.recompute: full}"), "has other settings"),
    ],
)
def test_the_folder_of_another_study_is_left_alone(
    study: Fixture, change: Callable[[str], str], said: str
) -> None:
    before = study.run().model_dump()
    study.config.write_text(change(STUDY))
    with pytest.raises(ConfigError, match=said):
        study.run()
    assert read_study(study.folder).model_dump() == before
    study.config.write_text(STUDY.replace("[1, 2, 3]", "[1, 2, 3, 4]"))
    study.run()
    assert study.started == ["seed4/1", "seed4/2"]


@pytest.mark.parametrize(
    ("outcome", "log", "state", "reason"),
    [
        (Outcome(code=0, seconds=1), "error: x", State.FINISHED, ""),
        (
            Outcome(code=1, seconds=1),
            "error: out of memory: 9.00 GiB at once were asked for",
            State.OUT_OF_MEMORY,
            "out of memory: 9.00 GiB at once were asked for",
        ),
        (
            Outcome(code=1, seconds=1),
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
            State.OUT_OF_MEMORY,
            "CUDA out of memory",
        ),
        (
            Outcome(code=137, seconds=1, killed_for_memory=True),
            "error: rank 1 was killed by SIGKILL",
            State.OUT_OF_MEMORY,
            "the kernel ended a process for lack of memory",
        ),
        (
            Outcome(code=1, seconds=1, killed_for_memory=True),  # another's process was killed
            "error: the disk is full",
            State.FAILED,
            "the disk is full",
        ),
        (
            Outcome(code=137, seconds=1),
            "error: rank 1 was killed by signal 9 (SIGKILL: out of memory?)",
            State.FAILED,
            "rank 1 was killed by signal 9",
        ),
        (Outcome(code=2, seconds=1), "error: no such file", State.REFUSED, "no such file"),
        (Outcome(code=1, seconds=1), "", State.FAILED, "ended with exit code 1"),
        (Outcome(code=1, seconds=1, timed_out=True), "x", State.TIMED_OUT, "within 60 s"),
    ],
)
def test_lack_of_memory_is_told_from_other_failures(
    tmp_path: Path, outcome: Outcome, log: str, state: State, reason: str
) -> None:
    (tmp_path / LAUNCHER_LOG).write_text(f"started rank 0\n{log}\nmore\n")
    found = judge(outcome, tmp_path, 60.0)
    assert found[0] is state and reason in found[1]


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    outcome = run_launches([Launch(command=("/nowhere/srun",))], tmp_path / LAUNCHER_LOG, 9.0)
    state, reason = judge(outcome, tmp_path, 9.0)
    assert (state, reason) == (State.REFUSED, "/nowhere/srun: No such file or directory")


def test_one_launcher_that_fails_ends_those_of_the_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.study.children._OTHERS_SECONDS", 0.3)
    sleeper = Launch(command=(sys.executable, "-c", "import time; time.sleep(99)"))
    broken = Launch(command=(sys.executable, "-c", "import sys; sys.exit(3)"))
    before = children()
    outcome = run_launches([sleeper, broken], tmp_path / LAUNCHER_LOG, 60.0)
    assert outcome.seconds < 20 and not outcome.timed_out
    assert children() <= before


def test_the_processes_of_a_study_that_is_killed_die_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeper = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    program = (
        "import sys; from pathlib import Path\n"
        "from common.study.children import run_launches\n"
        "from common.study.starting import Launch\n"
        f"run_launches([Launch(command=(sys.executable, '-c', {sleeper!r}))],"
        f" Path({str(tmp_path / 'log')!r}), 60.0)\n"
    )
    runner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    sleeping = psutil.Process(int(pid.read_text()))
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert sleeping.wait(timeout=20) in (None, -signal.SIGKILL)


# ---- where runs go ----


def planned(**axis: object) -> PlannedCell:
    tree = {
        "title": "t",
        "base": str(ROOT / "configs" / "gpt2" / "run_gpt2_tiny.yaml"),
        "settings": {"train.micro_batch_size": 2},
        "axes": {"cell": {"a": axis}},
    }
    return expand(Definition.model_validate(tree), ROOT / "x.yaml")[0]


def test_the_commands_are_those_of_the_launcher(tmp_path: Path) -> None:
    cell = planned(ranks=4, hosts=2)
    first, second = (each.command for each in launches(cell, tmp_path, Where()))
    assert "[0,2)" in first and "[2,4)" in second
    assert second[second.index("--node_rank") + 1] == "1"
    assert first[first.index("--master") + 1] == second[second.index("--master") + 1]
    over_ssh = launches(cell, tmp_path, Where(hosts=("a", "b", "c")))[0].command
    assert over_ssh[over_ssh.index("--hosts") + 1] == "a,b" and "--ssh" in over_ssh
    assert "[0,2)" in over_ssh
    slurm = launches(cell, tmp_path, Where(slurm=True))[0].command
    assert slurm[:5] == (
        "srun", "--kill-on-bad-exit=1", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2",
    )  # fmt: skip
    assert f"output_dir={tmp_path}" in slurm and slurm[slurm.index("--run_mode") + 1] == "train"
    peer = launches(planned(peer="transformers"), tmp_path, Where())[0].command
    assert peer[peer.index("--program") + 1].endswith("benchmarks/peers/transformers.py")


def test_why_a_cell_cannot_start_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_not_started(planned(ranks=2, hosts=2), Where(hosts=("a",))) == (
        "needs 2 hosts, and --hosts names 1"
    )
    monkeypatch.setattr("shutil.which", lambda name: None)
    horovod = planned(ranks=2, **{"parallel.strategy": "horovod"})
    assert reason_not_started(horovod, Where()).startswith(
        "parallel.strategy=horovod: horovodrun is not"
    )

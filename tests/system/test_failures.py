"""A launched run of which a rank is killed: exit code, blame, and no process left."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_tables import write_tutorial_table
from tests.run_scripts import listening_addresses, pids_with, process_of_rank, run_words, start_script, wait_until
from tests.system.test_restarts import CONFIG, rows_of
from tests.tiny import manifest_of

ENDLESS = {"train__max_steps": 100000, "checkpoint__interval": 10}


def launched(run: Path, corpus: Path, ranks: int, *, table: str = "none", **keys: object) -> subprocess.Popen[bytes]:
    words = run_words(run, corpus, **{**ENDLESS, **keys})
    return start_script(table, CONFIG, f"[0,{ranks})", "train", *words, log=run.with_suffix(".log"))


def kill_rank_1(run: Path, launcher: subprocess.Popen[bytes], *, seconds: float) -> None:
    """The run ends with its code and names it, nothing is left, and nobody saves after it."""
    os.kill(process_of_rank(str(run), 1), signal.SIGKILL)
    assert launcher.wait(timeout=seconds) == 128 + signal.SIGKILL
    text = run.with_suffix(".log").read_text()
    assert "rank 1" in text and "SIGKILL" in text and "mf_parallel1" in text
    assert pids_with(str(run)) == []


def test_a_killed_rank_ends_the_run_and_the_next_one_saves_when_it_is_told_to_stop(tmp_path, corpus_prefix) -> None:
    """Under ZeRO, where each rank writes its part of a checkpoint."""
    run = tmp_path / "run"
    launcher = launched(run, corpus_prefix, 2, parallel__zero_stage=2)
    wait_until(lambda: len(rows_of(run)) > 15, "steps")
    kill_rank_1(run, launcher, seconds=15)
    assert manifest_of(run)["state"]["step"] % 10 == 0, "nobody saves after a failure"

    before = rows_of(run)[-1][0]
    launcher = launched(run, corpus_prefix, 2, parallel__zero_stage=2)
    wait_until(lambda: rows_of(run)[-1][0] > before, "new steps")
    assert listening_addresses(pids_with(str(run))) == {"127.0.0.1"}, "a run on one host is closed to others"
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    steps = [row[0] for row in rows_of(run)]
    assert steps == list(range(1, len(steps) + 1)), "every step is there once"
    assert manifest_of(run)["state"]["step"] == len(steps), "saved where it stopped"
    assert not list((run / "checkpoints").glob(".*")), "what the kill left of a save is gone"
    assert pids_with(str(run)) == []


@pytest.mark.long
def test_a_killed_rank_of_mindspore_ends_its_run(tmp_path: Path, corpus_prefix: Path) -> None:
    """With a rank table, which Ascends read: on CPUs the ranks meet through MindSpore's scheduler
    all the same.
    """
    pytest.importorskip("mindspore", reason="MindSpore is not installed: pip install '.[mindspore]'")
    run = tmp_path / "run"
    table = write_tutorial_table(tmp_path / "table.json", servers=1, devices=2)
    changes: dict[str, Any] = {"backend": "mindspore", "checkpoint__interval": 2}
    changes["model__num_layers"] = 1
    launcher = launched(run, corpus_prefix, 2, table=str(table), **changes)
    wait_until(lambda: len(rows_of(run)) > 5, "steps", seconds=240)
    # the scheduler too
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert len(children) == 4 and listening_addresses(map(int, children)) == {"127.0.0.1"}
    kill_rank_1(run, launcher, seconds=30)
    assert manifest_of(run)["state"]["step"] % 2 == 0, "nobody saves after a failure"

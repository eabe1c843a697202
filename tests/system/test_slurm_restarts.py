"""A Slurm job that loses a rank and is queued again, with a stand-in for srun."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.run_scripts import (
    ROOT,
    clean_environment,
    pids_with,
    process_of_rank,
    run_words,
    wait_until,
)
from tests.slurm_stand_in import put_on_path
from tests.system.test_restarts import CONFIG, FAULTS, attempts_of, require_equal, rows_of


def start(
    folder: Path, restart: int, *words: str, tasks: int = 2, **variables: str
) -> "subprocess.Popen[str]":
    """Start the batch script as sbatch does, on as many nodes as tasks."""
    job = {
        "SLURM_JOB_ID": str(10000 + os.getpid() % 10000),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": str(tasks),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_SUBMIT_DIR": str(folder),
    } | ({"SLURM_RESTART_COUNT": str(restart)} if restart else {})
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "run_slurm.sh"), *words],
        cwd=ROOT,
        env=clean_environment(**({"PATH": put_on_path(folder / "bin")} | job | variables)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def submit(
    folder: Path, restart: int, *words: str, tasks: int = 2, **variables: str
) -> tuple[int, str]:
    """Run a training to its end: exit code and messages."""
    job = start(folder, restart, CONFIG, "train", *words, tasks=tasks, **variables)
    text, _ = job.communicate(timeout=120)
    return job.returncode, text


@pytest.mark.campaign
def test_a_requeued_job_resumes_from_the_newest_checkpoint(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    """Two nodes of one task each; the rank of the second is killed at step 8. Its losses are those
    of one process that nobody kills.
    """
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    program = FAULTS.replace('os.environ["RANK"]', 'os.environ["SLURM_PROCID"]')
    (tmp_path / "run_gpt2.py").write_text(program)
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps([{"rank": 1, "step": 8, "signal": int(signal.SIGKILL)}]))
    keys = {"train__max_steps": 12, "checkpoint__interval": 5, "model__dropout": 0}
    run = tmp_path / "run"
    words = run_words(run, corpus_prefix, **keys)
    code, text = submit(tmp_path, 0, *words, FAULTS=str(faults))
    assert code == 137, text
    assert pids_with(str(run)) == []
    assert json.loads(faults.read_text()) == [], text
    assert (run / "checkpoints" / "latest").read_text() == "step_00000005\n"
    assert rows_of(run)[-1][0] in (7, 8)

    code, text = submit(tmp_path, 1, *words, FAULTS=str(faults))
    assert code == 0, text
    assert pids_with(str(run)) == []
    assert "resuming" in text, text
    lines = [(line["attempt"], line["first_step"]) for line in attempts_of(run)]
    assert lines == [(1, 1), (2, 6)]

    alone = tmp_path / "alone"
    code, text = submit(
        tmp_path, 0, *run_words(alone, corpus_prefix, **keys), tasks=1, FAULTS=str(faults)
    )
    assert code == 0, text
    require_equal(run, alone)


@pytest.mark.campaign
def test_a_launcher_on_each_node_starts_the_ranks_again(
    tmp_path: Path, corpus_prefix: Path
) -> None:
    """--max_restarts of the batch script, without a new place in the queue. The killed rank is the
    second node's.
    """
    keys = {"train__max_steps": 300, "checkpoint__interval": 50, "model__dropout": 0}
    run, alone = tmp_path / "run", tmp_path / "alone"
    job = start(
        tmp_path, 0, "--max_restarts", "2", CONFIG, "train",
        *run_words(run, corpus_prefix, **keys), SLURM_SUBMIT_DIR=str(ROOT),
    )  # fmt: skip
    try:
        wait_until(lambda: len(rows_of(run)) > 60, "60 steps")
        os.kill(process_of_rank(str(run), 1), signal.SIGKILL)
        text, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, text
    assert "hosts by the step of Slurm: 2, this is number 1, rank 0 is on localhost" in text
    assert pids_with(str(run)) == []
    first, second = attempts_of(run)
    assert (first["exit_code"], first["then"], second["then"]) == (137, "restarted", "ended")
    assert second["first_step"] % 50 == 1 and 51 <= second["first_step"] <= first["last_step"]
    for rank in range(2):
        assert (run / f"mf_parallel{rank}" / "mindformer.log.1").exists()
    words = run_words(alone, corpus_prefix, **keys)
    code, text = submit(tmp_path, 0, *words, tasks=1, SLURM_SUBMIT_DIR=str(ROOT))
    assert code == 0, text
    require_equal(run, alone)


@pytest.mark.parametrize("words", [("--max_restarts",), ("--max_restarts", "x", CONFIG, "train")])
def test_restarts_without_a_number_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    job = start(tmp_path, 0, *words)
    text, _ = job.communicate(timeout=30)
    assert (job.returncode, text.startswith("Usage Help: ")) == (2, True)

"""A Slurm job that loses a rank and is queued again, with a stand-in for srun."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.run_scripts import ROOT, clean_environment, pids_with, run_words
from tests.slurm_stand_in import put_on_path
from tests.system.test_restarts import CONFIG, FAULTS, rows_of


def submit(
    folder: Path, restart: int, *words: str, tasks: int = 2, **variables: str
) -> tuple[int, str]:
    """Run the batch script as sbatch does, on as many nodes as tasks: exit code and messages."""
    job = {
        "SLURM_JOB_ID": str(10000 + os.getpid() % 10000),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": str(tasks),
        "SLURM_SUBMIT_DIR": str(folder),
    } | ({"SLURM_RESTART_COUNT": str(restart)} if restart else {})
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "run_slurm.sh"), CONFIG, "train", *words],
        cwd=ROOT,
        env=clean_environment(PATH=put_on_path(folder / "bin"), **job, **variables),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


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

    alone = tmp_path / "alone"
    code, text = submit(
        tmp_path, 0, *run_words(alone, corpus_prefix, **keys), tasks=1, FAULTS=str(faults)
    )
    assert code == 0, text
    for row, other in zip(rows_of(run), rows_of(alone), strict=True):
        assert (row[0], row[3]) == (other[0], other[3])
        assert row[1:3] == pytest.approx(other[1:3], rel=1e-6)

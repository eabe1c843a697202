"""A Slurm job that loses a rank and begins again, with a stand-in for srun."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.run_scripts import ROOT, clean_environment, pids_with, run_words
from tests.slurm_stand_in import put_on_path
from tests.system.test_restarts import CONFIG, FAULTS, attempts_of, require_equal, rows_of


def submit(folder: Path, *words: str, tasks: int = 2, **variables: str) -> tuple[int, str]:
    """Run the batch script as sbatch does, on as many nodes as tasks: exit code and messages."""
    job = {
        "SLURM_JOB_ID": str(10000 + os.getpid() % 10000),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": str(tasks),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_SUBMIT_DIR": str(folder),
        "PATH": put_on_path(folder / "bin"),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "run_slurm.sh"), *words], cwd=ROOT, text=True, timeout=120,
        env=clean_environment(**job | variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.campaign
@pytest.mark.parametrize("restarts", [(), ("--max_restarts", "2")], ids=["requeue", "launcher"])
def test_a_job_resumes_from_the_newest_checkpoint(tmp_path, corpus_prefix, restarts) -> None:
    """Two nodes of one task each; the rank of the second is killed at step 8. Slurm queues the job
    again, or a launcher on each node starts the ranks again. Losses are those of one process that
    nobody kills.
    """
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    program, launcher = tmp_path / "run_gpt2.py", tmp_path / "scripts" / "run_distribute.sh"
    rank = "RANK" if restarts else "SLURM_PROCID"
    program.write_text(FAULTS.replace('environ["RANK"]', f'environ["{rank}"]'))
    launcher.write_text(f'exec bash {ROOT}/scripts/run_distribute.sh --program {program} "$@"\n')
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps([{"rank": 1, "step": 8}]))
    keys = {"train__max_steps": 12, "checkpoint__interval": 5, "model__dropout": 0}
    run, alone = tmp_path / "run", tmp_path / "alone"
    words = [*restarts, CONFIG, "train", *run_words(run, corpus_prefix, **keys)]
    code, text = submit(tmp_path, *words, FAULTS=str(faults))
    assert json.loads(faults.read_text()) == [] and pids_with(str(run)) == [], text
    if restarts:
        assert "hosts by the step of Slurm: 2, this is number 1, rank 0 is on localhost" in text
        assert (run / "mf_parallel1" / "mindformer.log.1").exists()
    else:
        assert code == 137, text
        assert (run / "checkpoints" / "latest").read_text() == "step_00000005\n"
        assert rows_of(run)[-1][0] in (7, 8)
        code, text = submit(tmp_path, *words, FAULTS=str(faults), SLURM_RESTART_COUNT="1")
        assert "resuming" in text, text
    assert code == 0 and pids_with(str(run)) == [], text
    assert [(line["attempt"], line["first_step"]) for line in attempts_of(run)] == [(1, 1), (2, 6)]
    words = [CONFIG, "train", *run_words(alone, corpus_prefix, **keys)]
    code, text = submit(tmp_path, *words, tasks=1, FAULTS=str(faults))
    assert code == 0, text
    require_equal(run, alone)


def test_restarts_without_a_number_are_refused(tmp_path: Path) -> None:
    for words in (("--max_restarts",), ("--max_restarts", "x", CONFIG, "train")):
        code, text = submit(tmp_path, *words)
        assert (code, text.startswith("Usage Help: ")) == (2, True)

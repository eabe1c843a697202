"""Runs that DeepSpeed's own launcher starts, against one native process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.layouts import TENSOR, TOLERANCE, TORCH
from tests.ranks import ROOT, free_port
from tests.tiny import require_equal, train_here

pytestmark = pytest.mark.long

HOSTFILE = "localhost slots=4\n"
# the last two spare the launcher its questions over ssh
INCLUDE = "--hostfile hostfile --include localhost:1,3 --master_addr 127.0.0.1 --no_ssh_check"
STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two accelerators": ("--num_accelerators 2", {}),
    "a hostfile": (INCLUDE, TENSOR),
}


@pytest.mark.parametrize(
    "start", ["a hostfile", pytest.param("two accelerators", marks=pytest.mark.campaign)]
)
def test_losses(corpus_prefix: Path, tmp_path: Path, start: str) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    options, layout = STARTS[start]
    (tmp_path / "hostfile").write_text(HOSTFILE)
    alone = TORCH.job(tmp_path / "alone", corpus_prefix, train__max_steps=3)
    run = TORCH.job(
        tmp_path / "run", corpus_prefix, engine="deepspeed", **layout, train__max_steps=3
    )
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *options.split()]
    command += ["--master_port", str(free_port()), str(ROOT / "run_gpt2.py")]
    command += ["--config", "run.yaml", "--run_mode", "train"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPT2_")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    require_equal(tmp_path / "run", train_here(alone), TOLERANCE)
    ranks = 1 if layout else 2  # of the data axis
    assert f"micro 2 x data parallel {ranks} x" in done.stdout

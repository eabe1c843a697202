"""Ranks that the project's own script or DeepSpeed's launcher starts, against one process."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.layouts import TENSOR, TOLERANCE, TORCH
from tests.ranks import ROOT, free_port
from tests.run_scripts import clean_environment
from tests.tiny import require_equal, train_here

OURS = "bash scripts/run_distribute.sh none {config} [0,2) train"
# the last two words spare the launcher its questions over ssh
HOSTFILE = "--hostfile {folder}/hostfile --include localhost:1,3 --master_addr 127.0.0.1"
THEIRS = "{python} -m deepspeed.launcher.runner {options} --master_port {port} run_gpt2.py"
THEIRS += " --config {config} --run_mode train"
STARTS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "run_distribute": (OURS, "", {}, 2),
    "hostfile": (THEIRS, f"{HOSTFILE} --no_ssh_check", {"engine": "deepspeed"} | TENSOR, 1),
    "two accelerators": (THEIRS, "--num_accelerators 2", {"engine": "deepspeed"}, 2),
}
"""Command and options; settings, and ranks of the data axis."""
MARKS = {"hostfile": pytest.mark.long, "two accelerators": pytest.mark.campaign}


@pytest.mark.parametrize(
    "start", [pytest.param(name, marks=MARKS.get(name, ())) for name in STARTS]
)
def test_losses(corpus_prefix: Path, tmp_path: Path, start: str) -> None:
    command, options, settings, replicas = STARTS[start]
    if "engine" in settings and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    (tmp_path / "hostfile").write_text("localhost slots=4\n")
    alone, run = (
        TORCH.job(tmp_path / name, corpus_prefix, train__max_steps=3, **changes)
        for name, changes in (("alone", {}), ("run", settings | {"train__micro_batch_size": 1}))
    )
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(run))
    words = {"python": sys.executable, "port": free_port(), "folder": tmp_path, "config": config}
    words["options"] = options.format(**words)
    done = subprocess.run(
        command.format(**words).split(),
        cwd=ROOT,
        env=clean_environment(DS_ACCELERATOR="cpu", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    require_equal(tmp_path / "run", train_here(alone), TOLERANCE)
    assert f"micro 1 x data parallel {replicas} x" in done.stdout

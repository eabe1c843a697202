"""device=cuda in eager mode, on an H100 that computes nothing (tests/fake_cuda)."""

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import ROOT


def test_everything_on_one_gpu(cuda_variables: dict[str, str], tmp_path: Path) -> None:
    """cuda_checks.py in a process of its own: torch asks once whether there is a GPU."""
    checks = str(Path(__file__).with_name("cuda_checks.py"))
    words = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'cuda'}", checks]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | cuda_variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Kernels of torch's compiler and Triton for an H100, on machines without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT


@pytest.mark.parametrize(
    "mark", [pytest.param("not campaign", marks=pytest.mark.long), pytest.param("campaign", marks=pytest.mark.campaign)]
)
def test_every_kernel(mark: str, cuda_variables: dict[str, str], tmp_path: Path) -> None:
    """Starts gpu_checks.py."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install '.[dev]'")
    words = f"-q -p no:cacheprovider -p no:logging --all --basetemp={tmp_path / 'gpu'} -m"
    command = [sys.executable, "-m", "pytest", *words.split(), mark]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("gpu_checks.py"))], cwd=ROOT,
        env=os.environ | cuda_variables, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

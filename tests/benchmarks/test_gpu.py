"""Kernels of torch's compiler and Triton for an H100, on machines without one."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Triton has no wheel for this processor"
)


@pytest.fixture
def triton() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install '.[dev]'")


@pytest.mark.long
@pytest.mark.usefixtures("triton")
def test_one_block(cuda_variables: dict[str, str], tmp_path: Path) -> None:
    """Starts gpu_checks.py."""
    _check(cuda_variables, tmp_path, "not campaign")


@pytest.mark.campaign
@pytest.mark.usefixtures("triton")
def test_float8_and_every_option(cuda_variables: dict[str, str], tmp_path: Path) -> None:
    _check(cuda_variables, tmp_path, "campaign")


def _check(variables: dict[str, str], folder: Path, mark: str) -> None:
    checks = str(Path(__file__).with_name("gpu_checks.py"))
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:logging",
        "--all",
        "-m",
        mark,
        f"--basetemp={folder / 'gpu'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, checks],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout + done.stderr

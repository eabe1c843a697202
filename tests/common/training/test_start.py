"""Restarts that a run knows of by the variables of torchrun and Slurm."""

import os

import pytest

from common.training.start import _counts_restarts


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}, True),
        ({"SLURM_JOB_ID": "7"}, True),
        # the launcher writes the lines of its own attempts
        ({"SLURM_JOB_ID": "7", "GPT2_LAUNCHER_PID": "9", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_restarts(environ: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environ)
    assert _counts_restarts() is expected

"""Restarts that a run knows of by the variables of torchrun and Slurm."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.load import build_config
from common.training.start import _counts_restarts, _log_changes
from tests.tiny import tiny_run


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
    for name in (
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT",
        "GPT2_LAUNCHER_PID",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert _counts_restarts() is expected


def test_a_resume_names_the_schedule_of_an_older_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config: Any = build_config(tiny_run(corpus=Path("x")))
    data: Any = SimpleNamespace(fingerprint="f")
    for state, said in (({"step": 3}, True), ({"step": 3, "updated_samples": 6}, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            _log_changes({"state": state, "data": "f", "config": config.model_dump()}, config, data)
        assert ("from here it counts the updates that were made" in caplog.text) is said

"""Wheels for both kinds of machines: what pip says becomes one line each."""

import subprocess

import pytest

from tools import check_wheels

MISSING = "ERROR: No matching distribution found for thing"


@pytest.mark.parametrize(
    ("refused", "stderr", "code", "said"),
    [
        ("nothing of this", "", 0, "wheels of requirements.txt for aarch64: all there"),
        ("requirements.txt _aarch64", MISSING, 1, f"requirements.txt for aarch64: {MISSING}"),
        ("gigatoken _aarch64", MISSING, 0, f"fast for aarch64: left out there: {MISSING}"),
        ("requirements.txt", f"WARNING: Retrying (Retry(\n{MISSING}", 0, "wheels: not checked"),
    ],
)
def test_lines_and_exit_codes(refused, stderr, code, said, monkeypatch, capsys) -> None:
    """With a pip that fails where the words of ``refused`` are among its arguments."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert {"--only-binary=:all:", "--dry-run"} <= set(command)
        fails = all(word in " ".join(command) for word in refused.split())
        return subprocess.CompletedProcess(command, int(fails), "", stderr if fails else "")

    monkeypatch.setattr(subprocess, "run", run)
    assert check_wheels.main([]) == code
    assert said in capsys.readouterr().out

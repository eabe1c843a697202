"""Wheels for both kinds of machines: what pip says becomes one line each."""

import subprocess

import pytest

from tools import check_wheels

MISSING = "ERROR: No matching distribution found for thing"


def fake_pip(monkeypatch: pytest.MonkeyPatch, refused: str, stderr: str) -> None:
    """A pip that fails where the words of ``refused`` are among its arguments."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        arguments = " ".join(command)
        if all(word in arguments for word in refused.split()):
            return subprocess.CompletedProcess(command, 1, "", stderr)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    ("refused", "stderr", "code", "said"),
    [
        ("nothing of this", "", 0, "wheels of requirements.txt for aarch64: all there"),
        (
            "requirements.txt _aarch64",
            MISSING,
            1,
            f"wheels of requirements.txt for aarch64: {MISSING}",
        ),
        (
            "gigatoken _aarch64",
            MISSING,
            0,
            f"wheels of extra fast for aarch64: left out there: {MISSING}",
        ),
        (
            "requirements.txt",
            f"WARNING: Retrying (Retry(total=4\n{MISSING}",
            0,
            "wheels: not checked",
        ),
    ],
)
def test_lines_and_exit_codes(
    refused: str,
    stderr: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_pip(monkeypatch, refused, stderr)
    assert check_wheels.main([]) == code
    assert said in capsys.readouterr().out


def test_every_wheel_is_asked_for_without_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", MISSING)

    monkeypatch.setattr(subprocess, "run", run)
    check_wheels.main([])
    assert len(asked) == 16 and all(
        {"--only-binary=:all:", "--dry-run"} <= set(command) for command in asked
    )
    assert sum("--platform=manylinux2014_aarch64" in command for command in asked) == 8

"""tools/launch_container.py: the words that docker gets, from a program of this name that writes
them down.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tools import launch_container

ROOT = Path(__file__).parents[2]


def test_docker_gets_source_data_and_command(tmp_path) -> None:
    """OneFlow's own line, with the words that its seed shows."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.words"\nexit 7\n')
    docker.chmod(0o755)
    wheel = tmp_path / "a wheel.whl"
    wheel.write_bytes(b"")
    command = [
        sys.executable,
        "tools/launch_container.py",
        "--src",
        str(tmp_path),
        "--py",
        "3.7",
        "--image",
        "gpt2:dev",
        "--wheel",
        str(wheel),
    ]
    command += [
        "--cmd",
        "cd x; bash examples/pretrain_345M.sh",
        "--extra-mount",
        "/usr:/data",
        "--devices",
        "nvidia",
        "--no-interactive",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": f"{docker.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr
    words = (tmp_path / "bin" / "docker.words").read_text().splitlines()
    assert words[:2] == ["run", "--rm"] and "-it" not in words
    assert words[-4:] == [
        "gpt2:dev",
        "bash",
        "-c",
        f"pip install '{wheel}' && cd x; bash examples/pretrain_345M.sh",
    ]
    assert words[words.index("-w") + 1] == str(tmp_path)
    mounts = [word for before, word in pairwise(words) if before == "-v"]
    assert mounts == [f"{tmp_path}:{tmp_path}", "/usr:/data", f"{tmp_path}:{tmp_path}:ro"]
    assert words[words.index("--gpus") + 1] == "all"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--extra-mount", "/no/such"], "--extra-mount /no/such: /no/such does not exist"),
        (["--src", "/no/such"], "--src /no/such: is not a folder"),
        (["--wheel", "/no/such.whl"], "--wheel /no/such.whl: no such file"),
        (["--program", "no-such-docker"], "no-such-docker is not installed"),
    ],
)
def test_missing_inputs_are_named(words, message, capsys) -> None:
    assert launch_container.main(["--image", "x", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_ascend_is_passed_on_device_by_device(monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: [Path("/dev/davinci10"), Path("/dev/davinci2")]
    )
    assert launch_container.main(["--image", "x", "--devices", "ascend", "--dry-run"]) == 0
    assert (
        "--device /dev/davinci2 --device /dev/davinci10 --device /dev/davinci_manager"
        in capsys.readouterr().out
    )

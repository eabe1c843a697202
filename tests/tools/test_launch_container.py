"""tools/launch_container.py: the words that docker gets, from a program of this name that writes
them down.
"""

from itertools import pairwise
from pathlib import Path

from tools.launch_container import main


def test_docker_gets_source_data_and_command(tmp_path, monkeypatch) -> None:
    """OneFlow's own line, with the words that its seed shows."""
    docker, wheel = tmp_path / "docker", tmp_path / "a wheel.whl"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.words"\nexit 7\n')
    docker.chmod(0o755)
    wheel.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words = f"--src {tmp_path} --py 3.7 --image gpt2:dev --extra-mount /usr:/data --devices nvidia"
    command = "cd x; bash examples/pretrain_345M.sh"
    more = ["--no-interactive", "--wheel", str(wheel), "--cmd", command]
    assert main([*words.split(), *more]) == 7
    given = (tmp_path / "docker.words").read_text().splitlines()
    assert given[:2] == ["run", "--rm"] and "-it" not in given
    assert given[-4:] == ["gpt2:dev", "bash", "-c", f"pip install '{wheel}' && {command}"]
    assert given[given.index("-w") + 1] == str(tmp_path)
    mounts = [word for before, word in pairwise(given) if before == "-v"]
    assert mounts == [f"{tmp_path}:{tmp_path}", "/usr:/data", f"{tmp_path}:{tmp_path}:ro"]
    assert given[given.index("--gpus") + 1] == "all"


def test_an_ascend_is_passed_on_device_by_device(monkeypatch, capsys) -> None:
    there = [Path("/dev/davinci10"), Path("/dev/davinci2")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: there)
    assert main(["--image", "x", "--devices", "ascend", "--dry-run"]) == 0
    wanted = "--device /dev/davinci2 --device /dev/davinci10 --device /dev/davinci_manager"
    assert wanted in capsys.readouterr().out

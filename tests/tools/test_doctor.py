"""The doctor as a user starts it: real all-reduces on one and two hosts, a rank that hangs, broken
machines. What it refuses: test_refusals.py.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.cluster import hccn
from common.doctor import machine, software
from common.processes.addresses import free_port
from tests.cluster_tables import devices, table_1
from tools import doctor

ROOT = Path(__file__).resolve().parents[2]


def start(words: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), *words.split()]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=120)
    finally:
        process.kill()


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    """Processes of the two ranks, once the doctor has told that they were started."""
    assert process.stderr is not None
    assert any("started ranks" in line for line in process.stderr)
    ours = psutil.Process(process.pid).children()
    return [next(p.pid for p in ours if p.environ().get("RANK") == rank) for rank in "01"]


def are_gone(pids: list[int]) -> bool:
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return all(each.status() == psutil.STATUS_ZOMBIE for each in psutil.wait_procs(found, 10)[1])


def check_of(report: str, name: str) -> dict[str, Any]:
    return next(check for check in json.loads(report)["checks"] if check["name"] == name)


def needs(package: str) -> pytest.MarkDecorator:
    is_there = importlib.util.find_spec(package)
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed")


@needs("torch")
@pytest.mark.long
def test_the_doctors_of_two_hosts() -> None:
    """Both of this machine; both say the same."""
    words = f"--master 127.0.0.1:{free_port()} --nnodes 2 --ranks 1 --backend torch --json"
    processes = [start(f"{words} --time_limit 100 --node_rank {host}") for host in range(2)]
    reports = [finish(process)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], reports
    found = [check_of(report, "all-reduce") for report in reports]
    assert found[0] == found[1]
    assert found[0]["found"].startswith("2 ranks, gloo: the sum is right; 16 MiB in ")
    assert check_of(reports[1], "hosts")["found"] == "all 2 have come"


@needs("torch")
def test_a_rank_that_is_stopped_is_named_and_no_process_stays(tmp_path: Path) -> None:
    process = start("--ranks 2 --backend torch --time_limit 5", TMPDIR=str(tmp_path))
    pids = pids_of(process)
    os.kill(pids[1], signal.SIGSTOP)
    report, _ = finish(process)
    assert process.returncode == 2
    said = r"^error    all-reduce +stalled for 5 s \(--time_limit\):\n +rank 1 \(device 1\) has made no progress"
    assert re.search(rf"{said} for \d+ s: .*its process is stopped \(state T\)", report, flags=re.M)
    assert "-> kill -CONT its process, or end it" in report
    assert are_gone(pids)
    logs = sorted(path.name for path in tmp_path.glob("gpt2_doctor_*/*"))
    assert logs == ["mf_parallel0", "mf_parallel1"]


@needs("torch")
def test_the_doctor_takes_its_ranks_with_it(tmp_path: Path) -> None:
    process = start("--ranks 2 --backend torch", TMPDIR=str(tmp_path))
    pids = pids_of(process)
    process.terminate()
    finish(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert are_gone(pids) and not list(tmp_path.glob("gpt2_doctor_*"))


@pytest.mark.long
@needs("mindspore")
def test_mindspore_reduces_too() -> None:
    process = start("--ranks 2 --backend mindspore --json --time_limit 100")
    report, _ = finish(process)
    assert process.returncode == 0, report
    assert check_of(report, "all-reduce")["found"].startswith("2 ranks, mccl: the sum is right")


def test_a_broken_torch_does_not_break_the_doctor(tmp_path: Path) -> None:
    error = "libcudart.so.12: cannot open shared object file"
    (tmp_path / "torch.py").write_text(f"raise ImportError({error!r})\n")
    process = start("--ranks 2 --backend torch --json", PYTHONPATH=str(tmp_path))
    report, messages = finish(process)
    assert process.returncode == 2 and "Traceback" not in messages
    if software.installed_versions()["torch"]:
        assert error in check_of(report, "import torch")["found"]
    assert check_of(report, "all-reduce")["found"] == "not tried: torch does not import"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an accelerator, on which nothing is imported."""
    root = tmp_path / "root"
    versions = dict.fromkeys(software.PACKAGES) | {"torch": "2.7.1", "mindspore": "2.10.0"}
    check_devices, check_cann = machine.check_devices, software.check_cann
    monkeypatch.setattr(hccn, "npu_numbers", lambda *_: [])
    monkeypatch.setattr(machine, "check_devices", lambda asked: check_devices(root, asked=asked))
    monkeypatch.setattr(software, "check_cann", lambda environ, needed: check_cann({}, needed=needed, root=root))
    monkeypatch.setattr(software, "check_imports", lambda names, limit: ([], {}))
    monkeypatch.setattr(software, "installed_versions", lambda: versions)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.usefixtures("bare")
def test_an_accelerator_that_is_asked_for_and_not_there(capsys) -> None:
    for words, names in (
        ("--backend torch --device npu", {"CANN", "Ascend driver", "devices", "torch_npu"}),
        ("--backend torch --device cuda", {"GPUs"}),
        ("--backend torch", set()),
    ):
        assert doctor.main([*words.split(), "--json"]) == (2 if names else 0)
        errors = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["state"] == "error"]
        assert {check["name"] for check in errors} == names and all(check["remedy"] for check in errors)


@pytest.mark.usefixtures("bare")
def test_a_wrong_table_and_one_of_other_machines(tmp_path, capsys) -> None:
    """203.0.113.x are reserved for documentation (TEST-NET-3 of RFC 5737)."""

    def report_of(table: dict[str, Any], words: str = "") -> str:
        path = tmp_path / "table.json"
        path.write_text(json.dumps(table))
        assert doctor.main(["--rank_table", str(path), "--json", *words.split()]) == 2
        return capsys.readouterr().out

    there = [devices([f"192.168.4.{rank + 1}"], first_rank=rank) for rank in range(2)]
    table = table_1(*zip(("203.0.113.1", "203.0.113.2"), there, strict=True))
    check = check_of(report_of(table | {"server_count": "3"}), "rank table")
    assert check["state"] == "error" and "server_count" in check["found"]
    report = report_of(table)
    assert "2 ranks on 2 servers, sha256 " in check_of(report, "rank table")["found"]
    assert check_of(report, "ranks")["found"] == (
        "none of 203.0.113.1, 203.0.113.2 is this machine's; name the server of the rank table with --node_rank 0 to 1"
    )
    report = report_of(table, "--node_rank 1 --time_limit 1 --device cuda")
    assert check_of(report, "address")["found"] == "203.0.113.2 is not an address of this machine"
    assert "not tried" in check_of(report, "all-reduce")["found"]

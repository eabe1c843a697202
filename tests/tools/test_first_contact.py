"""tools/first_contact.py: how it judges, ends and continues, that its checks can start; tools/check_wheels.py."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.resolve.derive import resolve_config
from common.run_config import load_config
from common.yaml_files import dump_yaml, read_yaml_mapping
from tools import check_wheels, first_contact
from tools.first_contact import CHECKS, NO_TIME, ROOT, Check, Place, install, main

H100 = {"name": "NVIDIA H100 80GB HBM3", "count": 1, "memory": 80 * 2**30}
ASCEND = {"name": "Ascend910B3", "count": 2, "memory": 64 * 2**30}
SLEEP = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'],"
    " start_new_session=True); print('child:', child.pid, flush=True); child.wait()"
)
STUBS: dict[str, Any] = {
    "good": {"run": ["-c 'print(\"rate: 1,200\")'"], "figures": {"rate": {"speed": [1000, None]}}},
    "slow": {"run": ["-c 'print(\"rate: 3\")'"], "figures": {"rate": {"speed": [1000, None]}}},
    "wrong": {"run": ["-c 'print(\"loss: 0.2\")'"], "figures": {"loss": {"expect": [0, 0.1]}}},
    "silent": {"run": ["-c 1"], "figures": {"loss": {"expect": [0, 0.1]}}},
    "broken": {"run": ["-c 'raise SystemExit(\"error: it broke\")'", "-c 'print(\"unreached\")'"]},
    "hangs": {"run": [f"-c {shlex.quote(SLEEP)}"]},
    "elsewhere": {"on": ["npu"], "run": ["-c 1"]},
    "small": {"needs": {"GiB": 100}, "run": ["-c 1"]},
    "counted": {
        "run": ["-c 'print(\"one two two\")'"],
        "figures": {
            "one": {"find": "one", "count": True},
            "two": {"find": "two", "count": True, "expect": [2, 2]},
            "half": {"ratio": ["one", "two"], "expect": [0.5, 0.5]},
        },
    },
}


def write_checks(folder: Path, **changes: Any) -> None:
    checks = {name: {"asks": f"what {name} is"} | own for name, own in (STUBS | changes).items()}
    tree = {"configs": {}, "words": {"cuda": {}}, "checks": checks}
    (folder / "checks.yaml").write_text(dump_yaml(tree))


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Words of the tool, which finds STUBS."""
    write_checks(tmp_path)
    monkeypatch.setattr(first_contact, "CHECKS", tmp_path / "checks.yaml")
    monkeypatch.setattr(first_contact, "ask_device", lambda *_: H100)
    monkeypatch.setattr(first_contact, "LIMIT", 5.0)
    return ["--device", "cuda", "--out", str(tmp_path / "out")]


def rows(out: Path) -> dict[str, Any]:
    found = json.loads((out / "first_contact.json").read_text())["rows"]
    return {row["name"]: row for row in found}


def test_states_with_their_reasons(words: list[str], tmp_path: Path) -> None:
    """A check that hangs is ended with a child of a session of its own."""
    out = tmp_path / "out"
    assert main(words) == 1
    found = rows(out)
    assert {name: (row["state"], row["reason"]) for name, row in found.items()} == {
        "good": ("passed", ""),
        "slow": ("slower than expected", "rate 3, expected 1000 or more"),
        "wrong": ("failed", "loss 0.2, expected 0 to 0.1"),
        "silent": ("failed", "loss was not found"),
        "broken": ("failed", "it broke"),
        "hangs": ("failed", "did not end within 5 s (time_limit)"),
        "elsewhere": ("left out", "for npu"),
        "small": ("left out", "needs 100 GiB"),
        "counted": ("passed", ""),
    }
    assert found["counted"]["figures"]["half"] == {"value": 0.5, "expected": [0.5, 0.5]}
    assert "unreached" not in (out / "broken" / "log").read_text()
    child = re.search(r"child: (\d+)", (out / "hangs" / "log").read_text())
    assert child and not psutil.pid_exists(int(child[1]))
    table = (out / "table.md").read_text()
    assert "| good: what good is | passed | " in table and "| 1200 | 1000 or more |" in table


@pytest.mark.long
def test_a_run_ends_with_its_budget_and_continues(words, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert main([*words, "--budget", "0"]) == 0
    assert rows(out)["good"]["reason"] == NO_TIME
    assert main(words) == 2 and "--resume" in capsys.readouterr().err
    assert main([*words, "--resume", "--only", "good"]) == 0
    before = rows(out)["good"]
    assert main([*words, "--resume", "--only", "hangs", "--budget", "1"]) == 0
    assert rows(out)["hangs"]["reason"] == NO_TIME
    assert main([*words, "--resume"]) == 1
    after = rows(out)
    assert after["good"] == before
    assert after["hangs"]["state"] == after["wrong"]["state"] == "failed"


def test_an_interrupt_keeps_what_was_found(words: list[str], tmp_path: Path) -> None:
    stop = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(99)"
    nothing = {name: {"run": ["-c 1"]} for name in ("hangs", "wrong", "broken")}
    write_checks(tmp_path, slow={"run": [f"-c {shlex.quote(stop)}"]}, **nothing)
    assert main(words) == 130
    assert list(rows(tmp_path / "out")) == ["good"]
    write_checks(tmp_path, slow={"run": ["-c 1"]}, **nothing)
    began = time.time()
    assert main([*words, "--resume"]) == 1  # silent
    assert list(rows(tmp_path / "out")) == list(STUBS)
    assert (tmp_path / "out" / "good" / "log").stat().st_mtime < began


@pytest.mark.parametrize(
    ("kind", "device", "backend"),
    [
        ("cpu", H100, "torch"), ("cuda", H100, "torch"), ("npu", ASCEND, "torch"),
        ("npu", ASCEND, "mindspore"), ("cpu", H100, "mindspore"),
    ],
)  # fmt: skip
def test_every_check_of_the_list_can_start(kind, device, backend, tmp_path) -> None:
    """Its configurations resolve, its scripts and their options are there, and nothing is left of a placeholder."""
    tree = read_yaml_mapping(CHECKS)
    words = tree["words"][kind]
    place = Place(kind=kind, backend=backend, out=tmp_path, device=device, words=words)
    for name, config in tree["configs"].items():
        text = place.fill(dump_yaml({**config, "base": str(ROOT / config["base"])}))
        (tmp_path / f"{name}.yaml").write_text(text)
    checks = {name: Check(**fields) for name, fields in tree["checks"].items()}
    needs = {need for check in checks.values() for need in check.needs}
    of_device = {"known peak rates", "GiB", "devices", "float8 FLOP/s"}
    assert needs == of_device | {"uvicorn", "torchao", "deepspeed", "pytest"}
    said = (ROOT / first_contact.PROBES).read_text()
    trained = 0
    for check in checks.values():
        if kind not in check.on or check.backend not in (None, backend):
            continue
        for figure, rule in check.figures.items():
            assert rule.keys() & {"find", "ratio"} or figure[:7] in said, figure
        for command in check.run:
            filled = place.fill(command, tmp_path)
            assert "{" not in filled, filled
            script, *rest = shlex.split(filled)
            assert script == "-m" or (ROOT / script).is_file(), filled
            settings = [word for word in rest if re.match(r"[a-z_.0-9]+=", word)]
            if script == "tools/compare_runs.py" and "--set_a" in rest:
                paths, options = rest[:2], rest[2:]
                pairs = [*pairwise(options)]
                sides = [[of for word, of in pairs if word == f"--set_{side}"] for side in "ab"]
                ranks = [1, 1 + ("--ranks_b" in rest)]
            elif "--config" in rest:
                paths, sides, ranks = [rest[rest.index("--config") + 1]], [settings], [1]
            else:
                continue
            for path, side, size in zip(paths, sides, ranks, strict=True):
                resolve_config(load_config(Path(path), side), world_size=size)
                trained += 1
    assert trained > 10


def test_missing_wheels_are_installed_beside_the_rest(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/before")
    for name in ("first_contact_sample", "psutil"):  # one is there already
        files = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "RECORD": ""}
        files["WHEEL"] = "Wheel-Version: 1.0\nTag: py3-none-any\n"
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "VALUE = 7")
            for file, text in files.items():
                wheel.writestr(f"{name}-1.0.dist-info/{file}", text)
    install(tmp_path, tmp_path / "site")
    assert __import__("first_contact_sample").VALUE == 7
    assert not (tmp_path / "site" / "psutil.py").exists()
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'site'}:/before"


MISSING = "ERROR: No matching distribution found for thing"


@pytest.mark.parametrize(
    ("refused", "stderr", "code", "said"),
    [
        ("requirements.txt", MISSING, 1, f"requirements.txt for aarch64: {MISSING}"),
        ("gigatoken", MISSING, 0, f"fast for aarch64: left out there: {MISSING}"),
        ("requirements.txt", f"WARNING: Retrying (Retry(\n{MISSING}", 0, "wheels: not checked"),
    ],
)
def test_check_wheels_with_a_pip_that_refuses(refused, stderr, code, said, monkeypatch, capsys) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        fails = refused in str(command) and "_aarch64" in str(command)
        return subprocess.CompletedProcess(command, int(fails), "", stderr if fails else "")

    monkeypatch.setattr(subprocess, "run", run)
    assert check_wheels.main([]) == code and said in capsys.readouterr().out


@pytest.mark.long
def test_the_first_checks_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--device", "cpu", "--out", str(out)]
    assert main([*words, "--only", "data", "--only", "speed", "--only", "generation"]) == 0
    found = json.loads((out / "first_contact.json").read_text())
    states = [row["state"] for row in found["rows"]]  # a busy machine is slow
    assert states[:2] == ["passed", "left out"] and states[2] in ("passed", "slower than expected"), found
    figures = found["rows"][2]["figures"]
    assert figures["tokens/s of 1"]["value"] > 0
    assert figures["first beside second text of 1"]["expected"] == [0, 3]
    assert found["device"]["kind"] == "cpu" and found["versions"]["torch"]
    lines = (out / "table.md").read_text().splitlines()
    assert len(lines) == 2 + 1 + 1 + 4 and "left out: for cuda" in lines[3]


def test_the_probe_of_saves_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """With a smaller model in the place of 124M."""
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(sys, "path", list(sys.path))
    from benchmarks.first_contact import probes

    tree = {"base": str(ROOT / "configs/gpt2/run_gpt2_tiny.yaml"), "model": {"num_layers": 1, "vocab_size": 64}}
    (tmp_path / "configs/gpt2").mkdir(parents=True)
    (tmp_path / "configs/gpt2/run_gpt2_124m.yaml").write_text(dump_yaml(tree))
    monkeypatch.setattr(probes, "ROOT", tmp_path)
    assert probes.main(["saves", str(tmp_path / "run"), "cpu"]) == 0
    assert re.findall("^(.+): [0-9.e-]+$", capsys.readouterr().out, re.M) == ["training waits s", "written GB/s"]

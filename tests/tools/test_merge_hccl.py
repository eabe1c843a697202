"""Merged tables against the documented one; double, uneven and already merged inputs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.merge_hccl import main

ROOT = Path(__file__).resolve().parents[2]


def table(number: int, devices: int = 2, **more: Any) -> dict[str, Any]:
    chips = [
        {"device_id": str(i), "device_ip": f"192.168.{number}.{i + 1}", "rank_id": str(i)}
        for i in range(devices)
    ]
    server = {"server_id": f"10.0.0.{number}", "device": chips, "host_nic_ip": "reserve"}
    return {
        "version": "1.0",
        "server_count": "1",
        "server_list": [server],
        "status": "completed",
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.json and b.json, two servers of two devices, in the working folder."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("ab", 1):
        Path(f"{name}.json").write_text(json.dumps(table(number)))
    return tmp_path


def test_the_documented_table_is_the_merge_of_its_halves(samples: Path, tmp_path: Path) -> None:
    data = json.loads((samples / "v1.0_merge_hccl_2x8.json").read_text())
    for name, server in zip("xy", data["server_list"], strict=True):
        chips = [
            {**device, "rank_id": str(int(device["rank_id"]) % 8)} for device in server["device"]
        ]
        half = {**data, "server_count": "1", "server_list": [{**server, "device": chips}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(half))
    command = [sys.executable, str(ROOT / "tools" / "merge_hccl.py"), "x.json", "y.json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    path = tmp_path / "hccl_2s_16p.json"
    assert path.read_bytes() == json.dumps(data, indent=4).encode()
    assert done.stdout == f"Completed: hccl file was save in : {path}\n" and done.stderr == ""


def test_ranks_follow_the_arguments(folder: Path) -> None:
    Path("b.json").write_text(json.dumps(table(2, job="unknown keys stay")))
    assert main(["b.json", "a.json"]) == 0
    data = json.loads((folder / "hccl_2s_4p.json").read_text())
    assert data["job"] == "unknown keys stay"
    found = [
        (server["server_id"], [device["rank_id"] for device in server["device"]])
        for server in data["server_list"]
    ]
    assert found == [("10.0.0.2", ["0", "1"]), ("10.0.0.1", ["2", "3"])]


def test_super_pods_of_one_number_are_joined(folder: Path) -> None:
    for number, name in enumerate("ab", 1):
        data = table(
            number,
            version="1.2",
            super_pod_list=[
                {"super_pod_id": "7", "server_list": [{"server_id": f"10.0.0.{number}"}]}
            ],
        )
        for device in data["server_list"][0]["device"]:
            device["super_device_id"] = f"{number}{device['device_id']}"
        Path(f"{name}.json").write_text(json.dumps(data))
    assert main(["a.json", "b.json"]) == 0
    data = json.loads((folder / "hccl_2s_4p.json").read_text())
    assert data["version"] == "1.2"
    assert data["super_pod_list"] == [
        {"super_pod_id": "7", "server_list": [{"server_id": "10.0.0.1"}, {"server_id": "10.0.0.2"}]}
    ]


def same_address() -> dict[str, Any]:
    data = table(3)
    data["server_list"][0]["device"][1]["device_ip"] = "192.168.1.1"
    return data


def loopback() -> dict[str, Any]:
    data = table(3)
    data["server_list"][0]["server_id"] = "127.0.1.1"
    return data


def newer() -> dict[str, Any]:
    data = table(
        3,
        version="1.2",
        super_pod_list=[{"super_pod_id": "7", "server_list": [{"server_id": "10.0.0.3"}]}],
    )
    for device in data["server_list"][0]["device"]:
        device["super_device_id"] = device["device_id"]
    return data


@pytest.mark.parametrize(
    ("third", "words", "message"),
    [
        (
            table(1),
            ["a.json", "c.json"],
            r"server 10\.0\.0\.1 is in a\.json and in c\.json; name each server once",
        ),
        (
            table(3),
            ["a.json", "a.json"],
            r"server 10\.0\.0\.1 is in a\.json and in a\.json; name each server once",
        ),
        (
            same_address(),
            ["a.json", "c.json"],
            r"device_ip 192\.168\.1\.1 is in a\.json and in c\.json; name each server once",
        ),
        (
            loopback(),
            ["a.json", "c.json"],
            r"server 127\.0\.1\.1 is a loopback address.*--server_ip",
        ),
        (
            newer(),
            ["a.json", "c.json"],
            r"different versions \(a\.json has 1\.0, c\.json has 1\.2\)",
        ),
        (
            table(3, 4),
            ["a.json", "b.json", "c.json"],
            r"different numbers of devices \(10\.0\.0\.1 has 2,.* 10\.0\.0\.3 has 4\);",
        ),
        (table(3), ["a.json", "d.json"], r"d\.json: no such file"),
    ],
)
def test_bad_inputs_are_one_error(
    folder: Path, capsys: pytest.CaptureFixture[str], third: Any, words: list[str], message: str
) -> None:
    Path("c.json").write_text(json.dumps(third))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(message, error)
    assert not list(folder.glob("hccl*"))


def test_its_own_output_is_not_an_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own output, as `hccl*.json` would name it the second time."""
    assert main(["a.json", "b.json"]) == 0
    before = (folder / "hccl_2s_4p.json").read_bytes()
    assert main(["a.json", "b.json", "hccl_2s_4p.json"]) == 2
    assert (
        "is in a.json and in hccl_2s_4p.json; name each server once, with addresses of its own, and"
        " leave the output of an earlier merge out" in capsys.readouterr().err
    )
    assert main(["hccl_2s_4p.json"]) == 2
    assert "is both an input and an output" in capsys.readouterr().err
    assert (folder / "hccl_2s_4p.json").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "hccl_2s_4p.json"]


def test_version_2_is_not_an_input(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = samples / "v2.0_rank_list_950_2x2_ipv4.json"
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {path}: a rank table of version 2.0 names no servers"
    )


def test_no_input_is_refused() -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2

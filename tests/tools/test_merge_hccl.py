"""Merged tables against the documented one; ranks, super pods, and its own output again."""

import json
from pathlib import Path

import pytest

from tests.tools.test_refusals import of_server
from tools.merge_hccl import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_documented_table_is_the_merge_of_its_halves(samples, folder, capsys) -> None:
    data = json.loads((samples / "v1.0_merge_hccl_2x8.json").read_text())
    for name, server in zip("xy", data["server_list"], strict=True):
        chips = [device | {"rank_id": str(n)} for n, device in enumerate(server["device"])]
        half = {**data, "server_count": "1", "server_list": [{**server, "device": chips}]}
        Path(f"{name}.json").write_text(json.dumps(half))
    assert main(["x.json", "y.json"]) == 0
    path = folder / "hccl_2s_16p.json"
    assert path.read_bytes() == json.dumps(data, indent=4).encode()
    assert capsys.readouterr() == (f"Completed: hccl file was save in : {path}\n", "")
    # its own output, as `hccl*.json` would name it the second time
    assert main(["x.json", "y.json", path.name]) == 2
    assert "leave the output of an earlier merge out" in capsys.readouterr().err
    assert path.read_bytes() == json.dumps(data, indent=4).encode()


def test_ranks_follow_the_arguments_and_super_pods_of_one_number_are_joined() -> None:
    for number, name in enumerate("ab", 1):
        pod = {"super_pod_id": "7", "server_list": [{"server_id": f"10.0.0.{number}"}]}
        data = of_server(number, version="1.2", super_pod_list=[pod], job="unknown keys stay")
        for device in data["server_list"][0]["device"]:
            device["super_device_id"] = f"{number}{device['device_id']}"
        Path(f"{name}.json").write_text(json.dumps(data))
    assert main(["b.json", "a.json"]) == 0
    data = json.loads(Path("hccl_2s_4p.json").read_text())
    found = [
        (server["server_id"], [device["rank_id"] for device in server["device"]])
        for server in data["server_list"]
    ]
    assert found == [("10.0.0.2", ["0", "1"]), ("10.0.0.1", ["2", "3"])]
    assert (data["version"], data["job"]) == ("1.2", "unknown keys stay")
    servers = [{"server_id": "10.0.0.2"}, {"server_id": "10.0.0.1"}]
    assert data["super_pod_list"] == [{"super_pod_id": "7", "server_list": servers}]

"""The table that the original tool would write, names and bytes, the check of a table, and merged ones."""

import hashlib
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.tools.test_refusals import of_server
from tools import hccl_tools, merge_hccl
from tools.hccl_tools import main


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tmp_path the working folder, with addresses of 16 devices."""
    monkeypatch.chdir(tmp_path)
    lines = (f"address_{n}=192.168.1.{n + 1}\nnetmask_{n}=255.255.255.0\n" for n in range(16))
    Path("hccn.conf").write_text("".join(lines))


def generate(*words: str) -> int:
    return main(["--hccn_conf", "hccn.conf", "--output_dir", "out", *words])


def test_the_documented_table_byte_for_byte(samples: Path, tmp_path, monkeypatch, capsys) -> None:
    """Addresses by a stand-in for hccn_tool on PATH, as on the documented machine; the file lands
    in the working folder.
    """
    data = json.loads((samples / "v1.0_mindformers_1x8.json").read_text())
    chips = data["server_list"][0]["device"]
    tool = tmp_path / "hccn_tool"
    cases = "".join(f'{d["device_id"]}) echo "ipaddr:{d["device_ip"]}";;\n' for d in chips)
    tool.write_text(f'#!/bin/sh\n[ "$1 $3 $4" = "-i -ip -g" ] || exit 9\ncase "$2" in\n{cases}esac')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert main(["--device_num", "[0,8)", "--server_ip", "10.155.111.140"]) == 0
    path = tmp_path / "hccl_8p_01234567_10.155.111.140.json"
    assert path.read_bytes() == json.dumps(data, indent=4).encode()
    said = capsys.readouterr()
    last = "rank_id:7, device_id:7, device_ip:192.4.27.7\nCompleted: hccl file was save in : "
    assert said.out.endswith(f"{last}{path}\n") and said.err == ""


@pytest.mark.usefixtures("conf")
@pytest.mark.parametrize(
    ("words", "name", "numbers"),
    [
        (["--device_num", " [ 4, 8 ] "], "hccl_4p_4567_10.0.0.1.json", [4, 5, 6, 7]),
        (["--device_num", "[2,6)"], "hccl_4p_2345_10.0.0.1.json", [2, 3, 4, 5]),
        (["--device_num", "[8,10)", "--device_num_per_node", "16"], "hccl_2p_89_10.0.0.1.json", [8, 9]),
        (["--device_num", "[0,3)", "--visible_devices", "4,5, 7"], "hccl_3p_012_10.0.0.1.json", [4, 5, 7]),
        (["--device_num", "[0,1)", "--server_ip", "FD00:0::12"], "hccl_1p_0_fd00--12.json", [0]),
    ],
)
def test_ranges(words: list[str], name: str, numbers: list[int], capsys) -> None:
    """Logical devices in the name, physical ones in the table."""
    assert generate("--server_ip", "10.0.0.1", *words) == 0
    (server,) = json.loads(Path("out", name).read_text())["server_list"]
    assert server["server_id"] == name.rpartition("_")[2][: -len(".json")].replace("--", "::")
    assert server["device"] == [
        {"device_id": str(number), "device_ip": f"192.168.1.{number + 1}", "rank_id": str(rank)}
        for rank, number in enumerate(numbers)
    ]
    assert ("cards 0-3 and 4-7" in capsys.readouterr().err) == (numbers == [2, 3, 4, 5])


@pytest.mark.usefixtures("conf")
def test_the_host_name_gives_the_address(capsys, monkeypatch) -> None:
    monkeypatch.setattr(hccl_tools.socket, "gethostbyname", lambda host: "10.0.0.9")
    assert generate("--device_num", "[0,1)") == 0
    assert Path("out/hccl_1p_0_10.0.0.9.json").exists()
    message = r"error: the address of host name \S+ .*--server_ip ADDRESS\n"
    for look_up in (Mock(return_value="127.0.1.1"), Mock(side_effect=OSError(0, "unknown host"))):
        monkeypatch.setattr(hccl_tools.socket, "gethostbyname", look_up)
        assert generate() == 2 and re.search(message, capsys.readouterr().err)


@pytest.mark.usefixtures("conf")
def test_an_output_folder_that_is_a_file(capsys) -> None:
    Path("out").touch()
    assert generate("--server_ip", "10.0.0.1") == 1
    assert "could not be written" in capsys.readouterr().err


VALID = {"v0_modelarts_k8s_jobstart_2x8_unordered": 16, "v1.2_a3_superpod_1x16": 16, "v2.0_rank_list_950_2x2_ipv4": 4}


def test_the_check_of_a_table(samples: Path, capsys) -> None:
    for name, count in VALID.items():
        path = samples / f"{name}.json"
        assert main(["--check", str(path)]) == 0
        output = capsys.readouterr()
        head, *rows, digest = output.out.splitlines()
        assert head == "rank device_id device_ip server" and output.err == ""
        assert [row.split()[0] for row in rows] == [str(rank) for rank in range(count)]
        assert digest == f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}  {path}"
        if "unordered" in name:
            assert (rows[0], rows[15]) == ("0 0 192.1.65.251 10.19.1.142", "15 7 192.4.33.172 10.19.1.79")


def test_a_single_loopback_server_is_a_warning(samples: Path, tmp_path: Path, capsys) -> None:
    text = (samples / "v1.0_mindformers_1x8.json").read_text()
    (tmp_path / "table.json").write_text(text.replace("10.155.111.140", "127.0.1.1"))
    assert main(["--check", str(tmp_path / "table.json")]) == 0
    assert re.match(r"warning: .*127\.0\.1\.1 is a loopback address.*\n$", capsys.readouterr().err)


# ---- merge_hccl ----


@pytest.mark.usefixtures("conf")
def test_the_documented_table_is_the_merge_of_its_halves(samples, tmp_path, capsys) -> None:
    data = json.loads((samples / "v1.0_merge_hccl_2x8.json").read_text())
    for name, server in zip("xy", data["server_list"], strict=True):
        chips = [device | {"rank_id": str(n)} for n, device in enumerate(server["device"])]
        half = {**data, "server_count": "1", "server_list": [{**server, "device": chips}]}
        Path(f"{name}.json").write_text(json.dumps(half))
    assert merge_hccl.main(["x.json", "y.json"]) == 0
    path = tmp_path / "hccl_2s_16p.json"
    assert path.read_bytes() == json.dumps(data, indent=4).encode()
    assert capsys.readouterr() == (f"Completed: hccl file was save in : {path}\n", "")
    # its own output, as `hccl*.json` would name it the second time
    assert merge_hccl.main(["x.json", "y.json", path.name]) == 2
    assert "leave the output of an earlier merge out" in capsys.readouterr().err
    assert path.read_bytes() == json.dumps(data, indent=4).encode()


@pytest.mark.usefixtures("conf")
def test_ranks_follow_the_arguments_and_super_pods_of_one_number_are_joined() -> None:
    for number, name in enumerate("ab", 1):
        pod = {"super_pod_id": "7", "server_list": [{"server_id": f"10.0.0.{number}"}]}
        data = of_server(number, version="1.2", super_pod_list=[pod], job="unknown keys stay")
        for device in data["server_list"][0]["device"]:
            device["super_device_id"] = f"{number}{device['device_id']}"
        Path(f"{name}.json").write_text(json.dumps(data))
    assert merge_hccl.main(["b.json", "a.json"]) == 0
    data = json.loads(Path("hccl_2s_4p.json").read_text())
    found = {server["server_id"]: [device["rank_id"] for device in server["device"]] for server in data["server_list"]}
    assert found == {"10.0.0.2": ["0", "1"], "10.0.0.1": ["2", "3"]}
    assert (data["version"], data["job"]) == ("1.2", "unknown keys stay")
    servers = [{"server_id": "10.0.0.2"}, {"server_id": "10.0.0.1"}]
    assert data["super_pod_list"] == [{"super_pod_id": "7", "server_list": servers}]

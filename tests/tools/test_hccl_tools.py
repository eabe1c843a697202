"""The table that the original tool would write, names and bytes. Refusals, and the check of a
table.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import hccl_tools
from tools.hccl_tools import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "hccn.conf"
    path.write_text(
        "".join(
            f"address_{number}=192.168.1.{number + 1}\nnetmask_{number}=255.255.255.0\n"
            for number in range(16)
        )
    )
    return path


def generate(conf: Path, *words: str) -> int:
    return main(["--hccn_conf", str(conf), "--output_dir", str(conf.parent / "out"), *words])


def read(conf: Path, name: str) -> list[tuple[str, str, str]]:
    data = json.loads((conf.parent / "out" / name).read_text())
    return [
        (device["rank_id"], device["device_id"], device["device_ip"])
        for device in data["server_list"][0]["device"]
    ]


def test_the_documented_table_byte_for_byte(samples: Path, tmp_path: Path) -> None:
    """Addresses by a stand-in for hccn_tool on PATH, as on the documented machine; the file lands
    in the working folder.
    """
    data = json.loads((samples / "v1.0_mindformers_1x8.json").read_text())
    tool = tmp_path / "bin" / "hccn_tool"
    tool.parent.mkdir()
    cases = "".join(
        f'{d["device_id"]}) echo "ipaddr:{d["device_ip"]}";;\n'
        for d in data["server_list"][0]["device"]
    )
    tool.write_text(
        f'#!/bin/sh\n[ "$1 $3 $4" = "-i -ip -g" ] || exit 9\ncase "$2" in\n{cases}esac\necho'
        " netmask:255.255.255.0\n"
    )
    tool.chmod(0o755)
    command = [
        sys.executable,
        str(ROOT / "tools" / "hccl_tools.py"),
        "--device_num",
        "[0,8)",
        "--server_ip",
        "10.155.111.140",
    ]
    environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    path = tmp_path / "hccl_8p_01234567_10.155.111.140.json"
    assert path.read_bytes() == json.dumps(data, indent=4).encode()
    assert done.stdout.endswith(
        f"rank_id:7, device_id:7, device_ip:192.4.27.7\nCompleted: hccl file was save in : {path}\n"
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "name", "numbers"),
    [
        (["--device_num", "[0,4)"], "hccl_4p_0123_10.0.0.1.json", [0, 1, 2, 3]),
        (["--device_num", "[0,4]"], "hccl_4p_0123_10.0.0.1.json", [0, 1, 2, 3]),
        (["--device_num", " [ 4, 8 ) "], "hccl_4p_4567_10.0.0.1.json", [4, 5, 6, 7]),
        (
            ["--device_num", "[8,12)", "--device_num_per_node", "16"],
            "hccl_4p_891011_10.0.0.1.json",
            [8, 9, 10, 11],
        ),
        (
            ["--device_num", "[0,4)", "--visible_devices", "4,5, 6,7"],
            "hccl_4p_0123_10.0.0.1.json",
            [4, 5, 6, 7],
        ),
    ],
)
def test_ranges(conf: Path, words: list[str], name: str, numbers: list[int]) -> None:
    """Logical devices in the name, physical ones in the table."""
    assert generate(conf, "--server_ip", "10.0.0.1", *words) == 0
    assert read(conf, name) == [
        (str(rank), str(number), f"192.168.1.{number + 1}") for rank, number in enumerate(numbers)
    ]


def test_a_name_of_an_ipv6_server_has_no_colons(conf: Path) -> None:
    assert generate(conf, "--device_num", "[0,1)", "--server_ip", "FD00:0::12") == 0
    [path] = (conf.parent / "out").iterdir()
    assert path.name == "hccl_1p_0_fd00--12.json"
    assert json.loads(path.read_text())["server_list"][0]["server_id"] == "fd00::12"


def test_the_host_name_gives_the_address(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hccl_tools.socket, "gethostbyname", lambda name: "10.0.0.9")
    assert generate(conf, "--device_num", "[0,1)") == 0
    assert len(read(conf, "hccl_1p_0_10.0.0.9.json")) == 1


def test_a_range_over_two_rings_is_remarked(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(conf, "--device_num", "[2,6)", "--server_ip", "10.0.0.1") == 0
    assert "cards 0-3 and 4-7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--device_num", "[4,4)"],
            r"\[4,4\): the range is empty; its end is exclusive, so '\[4,5\)'",
        ),
        (["--device_num", "[3,1)"], "the range is empty"),
        (
            ["--device_num", "[0,16)"],
            r"goes past the 8 devices of a node; give --device_num_per_node 16",
        ),
        (["--device_num", "[0,999999999999)"], "goes past the 8 devices"),
        (["--device_num", "(0,8)"], r"expected a range such as '\[0,8\)', in quotes"),
        (["--device_num", "0"], "expected a range"),
        (["--device_num", "[0,-1)"], "expected a range"),
        (["--device_num_per_node", "0"], "--device_num_per_node 0: expected 1 to 1024"),
        (
            ["--device_num_per_node", "99999999999999"],
            "--device_num_per_node 99999999999999: expected 1 to 1024",
        ),
        (
            ["--visible_devices", ",".join(map(str, range(2000)))],
            "--visible_devices names 2000 devices, 1024 at most",
        ),
        (
            ["--visible_devices", "4,5,6,7"],
            r"needs 8 visible devices, but --visible_devices names 4",
        ),
        (["--visible_devices", "0,1,1,2,3,4,5,6"], "device 1 is there twice"),
        (["--visible_devices", "0,,1"], "expected device numbers with commas"),
        (
            ["--server_ip", "127.0.1.1"],
            r"--server_ip is 127\.0\.1\.1, a loopback address.*--server_ip ADDRESS",
        ),
        (["--server_ip", "::1"], "--server_ip is ::1, a loopback"),
        (["--server_ip", "node1"], "--server_ip: 'node1' is not an IP address"),
        (["--server_ip", "0.0.0.0"], "is not the address of one machine"),
        (
            ["--device_num_per_node", "32", "--device_num", "[15,17)"],
            r"no line address_16=.*devices with an address there: 0, 1, 2",
        ),
    ],
)
def test_bad_arguments_are_one_error(
    conf: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert generate(conf, "--server_ip", "10.0.0.1", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(message, error)
    assert not (conf.parent / "out").exists()


def test_an_address_twice_is_refused(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conf.write_text("address_0=10.1.1.1\naddress_1=10.1.1.1\n")
    assert generate(conf, "--server_ip", "10.0.0.1", "--device_num", "[0,2)") == 2
    assert (
        "rank 1 (device 1 of 10.0.0.1): device_ip 10.1.1.1 is also that of rank 0"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["127.0.1.1", OSError(0, "unknown host")])
def test_a_host_name_that_leads_nowhere(
    conf: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str | OSError,
) -> None:
    def look_up(host: str) -> str:
        if isinstance(name, OSError):
            raise name
        return name

    monkeypatch.setattr(hccl_tools.socket, "gethostbyname", look_up)
    assert generate(conf) == 2
    assert re.search(
        r"error: the address of host name \S+ .*--server_ip ADDRESS\n", capsys.readouterr().err
    )


def test_an_output_folder_that_is_a_file(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (conf.parent / "out").write_text("")
    assert generate(conf, "--server_ip", "10.0.0.1") == 1
    assert "could not be written" in capsys.readouterr().err


# ---- --check

VALID = {
    "v0_modelarts_cce_1x1": 1,
    "v0_modelarts_k8s_jobstart_2x8_unordered": 16,
    "v1.0_merge_hccl_2x8": 16,
    "v1.0_mindformers_1x8": 8,
    "v1.0_modelarts_generated_2x8_nohostnic": 16,
    "v1.2_a3_superpod_1x16": 16,
    "v2.0_rank_list_950_2x2_ipv4": 4,
}


def test_every_sample_is_valid_or_refused(
    samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.stem for path in samples.glob("*.json")} == {*VALID, "status_initializing"}
    for name, ranks in VALID.items():
        path = samples / f"{name}.json"
        assert main(["--check", str(path)]) == 0
        output = capsys.readouterr()
        head, *rows, digest = output.out.splitlines()
        assert head == "rank device_id device_ip server" and output.err == ""
        assert [row.split()[0] for row in rows] == [str(rank) for rank in range(ranks)]
        assert digest == f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}  {path}"
    assert main(["--check", str(samples / "status_initializing.json")]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "status is 'initializing'" in output.err


def test_the_rows_of_a_check(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--check", str(samples / "v0_modelarts_k8s_jobstart_2x8_unordered.json")])
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[1] == "0 0 192.1.65.251 10.19.1.142" and lines[16] == "15 7 192.4.33.172 10.19.1.79"
    )


@pytest.mark.parametrize("servers", [1, 2])
def test_a_single_loopback_server_is_a_warning_and_an_error_among_others(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], servers: int
) -> None:
    name = {1: "v1.0_mindformers_1x8", 2: "v1.0_merge_hccl_2x8"}[servers]
    data = json.loads((samples / f"{name}.json").read_text())
    data["server_list"][0]["server_id"] = "127.0.1.1"
    (tmp_path / "table.json").write_text(json.dumps(data))
    assert main(["--check", str(tmp_path / "table.json")]) == {1: 0, 2: 2}[servers]
    error = capsys.readouterr().err
    assert (
        error.startswith({1: "warning: ", 2: "error: "}[servers])
        and "127.0.1.1 is a loopback address" in error
        and error.count("\n") == 1
    )

"""Rank tables of vendors' documents and of a strategy: what is read, written again, refused. Device addresses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import common.cluster.hccn as module
import common.cluster.rank_table_files as files
from common.cluster.environment import find_process
from common.cluster.hccn import device_addresses
from common.cluster.places import find_places
from common.cluster.rank_table import table_warnings
from common.cluster.rank_table_files import read_table, to_json, wait_for_table, write_table
from common.errors import DataError
from tests import cluster_tables
from tests.cluster_tables import devices
from tools.hccl_tools import main

REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


def put(folder: Path, data: Any) -> Path:
    path = folder / "table.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def table_1(*sizes: int) -> dict[str, Any]:
    """Return a table of servers with so many devices; of two with two each, if none is given."""
    servers, first = [], 0
    for number, size in enumerate(sizes or (2, 2), 1):
        addresses = [f"192.168.{number}.{i + 1}" for i in range(size)]
        servers.append((f"10.0.0.{number}", devices(addresses, first_rank=first)))
        first += size
    return cluster_tables.table_1(*servers, host_nic_ip="reserve")


def table_12() -> dict[str, Any]:
    data = {**table_1(), "version": "1.2"}
    held = [device for one in data["server_list"] for device in one["device"]]
    for number, device in enumerate(held):
        device["super_device_id"] = str(1000 + number)
    members = [{"server_id": f"10.0.0.{number}"} for number in (1, 2)]
    data["super_pod_list"] = [{"super_pod_id": "0", "server_list": members}]
    return data


def instance(number: int, count: int = 1, ranks: str = "", **more: Any) -> dict[str, Any]:
    """Return an instance, whose devices may have ranks."""
    chips = devices([f"192.168.{number}.{i + 1}" for i in range(len(ranks) or count)])
    for chip, rank in zip(chips, ranks, strict=False):
        chip["rank_id"] = rank
    return {"server_id": f"10.0.0.{number}", "devices": chips, **more}


def table_0(*instances: dict[str, Any]) -> dict[str, Any]:
    groups = [{"group_name": "job", "instance_list": list(instances)}]
    return {"status": "completed", "group_count": "1", "group_list": groups}


# ---- the samples


@pytest.mark.parametrize(
    "name",
    ["v1.0_mindformers_1x8", "v1.0_merge_hccl_2x8", "v1.0_modelarts_generated_2x8_nohostnic", "v1.2_a3_superpod_1x16"],
)
def test_a_sample_keeps_every_value_when_written_again(samples: Path, tmp_path: Path, name: str) -> None:
    """Keys that only some tables have (host_nic_ip, container_ip) stay, and none is added."""
    source = samples / f"{name}.json"
    data = json.loads(source.read_text())
    table = read_table(source)
    write_table(table, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == data


def test_the_platform_table_becomes_the_one_its_launcher_makes(samples: Path) -> None:
    """Pods are listed 1, 0: the rank order follows their names."""
    table = read_table(samples / "v0_modelarts_k8s_jobstart_2x8_unordered.json")
    assert to_json(table) == json.loads((samples / "v1.0_modelarts_generated_2x8_nohostnic.json").read_text())


def test_a_network_instance_may_span_machines_and_have_other_addresses(samples: Path, tmp_path: Path) -> None:
    """One instance of four ranks: device ids repeat, local ids do not. An EID is not an IP address.
    The table is not written.
    """
    data = json.loads((samples / "v2.0_rank_list_950_2x2_ipv4.json").read_text())
    with pytest.raises(DataError, match=r"version 2\.0 names no servers.*msrun"):
        to_json(read_table(put(tmp_path, data)))
    for number, entry in enumerate(data["rank_list"]):
        entry["local_id"] = number
        entry["level_list"][0]["net_instance_id"] = "pod"
        entry["level_list"][0]["rank_addr_list"][0] |= {"addr_type": "EID", "addr": f"00:0{number}"}
    places = read_table(put(tmp_path, data)).places()
    found = [(one.server_id, device.device_id, device.device_ip) for one, device in places]
    assert found == [("pod", number % 2, None) for number in range(4)]
    data["rank_list"][3]["level_list"][0]["net_instance_id"] = "pod2"
    assert [len(one.device) for one in read_table(put(tmp_path, data)).server_list] == [3, 1]


# ---- the order of ranks in a platform's table


@pytest.mark.parametrize(
    ("instances", "hosts"),
    [
        ([instance(1, pod_name="job-10"), instance(2, pod_name="job-9")], "21"),
        ([instance(1, pod_name="b"), instance(2, pod_name="a"), instance(3, pod_name="w-7")], "312"),
        ([instance(1, pod_name="job-0", rank_id="1"), instance(2, pod_name="job-1", rank_id=0)], "21"),
        # a rank of a device goes before that of its instance
        ([instance(1, ranks="1", rank_id="1"), instance(2, ranks="02", rank_id="0")], "212"),
        ([instance(1, 2, rank_id="7"), instance(2, 2, rank_id="3")], "2211"),
    ],
)
def test_instances_are_ordered(tmp_path: Path, instances: list[dict[str, Any]], hosts: str) -> None:
    table = read_table(put(tmp_path, table_0(*instances)))
    assert [one.server_id for one, _ in table.places()] == [f"10.0.0.{number}" for number in hosts]


def test_instances_of_one_server_are_joined_and_unknown_keys_stay(tmp_path: Path) -> None:
    more = {"zone": "z", "pod_names": 3}
    chip = {"device_id": "5", "device_ip": "192.168.9.9", "plane": "b"}
    second = {**instance(1, rank_id="1"), "devices": [chip], **more}
    # the last would be wrong in version 1.0
    data = {**table_0(instance(1, rank_id="0"), second), "job_id": "j", "server_count": "9"}
    written = to_json(read_table(put(tmp_path, data)))
    first = {"device_id": "0", "device_ip": "192.168.1.1", "rank_id": "0"}
    servers = [{"server_id": "10.0.0.1", "device": [first, chip | {"rank_id": "1"}], **more}]
    given = {"version": "1.0", "server_count": "1", "server_list": servers}
    assert written == {**given, "status": "completed", "job_id": "j"}


def test_the_order_in_the_file_does_not_matter(tmp_path: Path) -> None:
    """Ranks are spread over both servers; unknown keys and both families of addresses stay."""
    data = table_12()
    held = [device for one in data["server_list"] for device in one["device"]]
    for device, rank in zip(held, "2031", strict=True):
        device |= {"rank_id": rank, "x_plane": ["b", int(rank)]}
    held[0]["device_ip"] = "fd00::1"
    table = read_table(put(tmp_path, data))
    found = [(one.server_id, device.device_ip) for one, device in table.places()]
    by_rank = {int(d["rank_id"]): d["device_ip"] for d in held}
    assert [address for _, address in found] == [by_rank[rank] for rank in range(4)]
    write_table(table, tmp_path / "again.json")
    assert read_table(tmp_path / "again.json") == table
    for one in data["server_list"]:
        one["device"].reverse()
    data["server_list"].reverse()
    assert read_table(put(tmp_path, data)) == table


# ---- what is wrong


def changed(changes: str, data: Any) -> Any:
    """Return the table with changes such as ``server_list.0.device=[]``.

    Without a value the key is removed. ``device`` stands for the first device of all.
    """
    for change in re.split(r" (?=\w+\.[\w.]+=)", changes):
        name, mark, value = re.sub("^device", "server_list.0.device.0", change).partition("=")
        *path, last = [int(key) if key.isdigit() else key for key in name.split(".")]
        holder = data
        for key in path:
            holder = holder[key]
        if mark:
            holder[last] = json.loads(value)
        else:
            del holder[last]
    return data


def test_lines_of_comment_and_a_byte_order_mark_are_left_out(tmp_path: Path) -> None:
    """Comments as at the head of the sample in MindFormers' documents; a # in a value stays."""
    data = table_1() | {"note": "# kept"}
    plain = read_table(put(tmp_path, data))
    text = "\ufeff# 4机32卡参考样例\n" + json.dumps(data, indent=1).replace("{\n", "{\n  # a host\n", 1)
    assert read_table(put(tmp_path, text)) == plain
    assert "# kept" in json.dumps(to_json(plain))
    with pytest.raises(DataError, match=r"absent\.json: no such file; make a rank table with"):
        read_table(tmp_path / "absent.json")


def wrong_table(change: Any, samples: Path) -> Any:
    """Return the text or the table that a row of WRONG is or means."""
    if not isinstance(change, str) or change[:1] in ("{", "["):
        return change
    version, _, rest = change.partition(" ")
    if version == "2.0":
        return changed(rest, json.loads((samples / "v2.0_rank_list_950_2x2_ipv4.json").read_text()))
    tables = {"1.2": table_12, "0": lambda: table_0(instance(1))}
    return changed(rest, tables[version]()) if version in tables else changed(change, table_1())


WRONG = [
    *REFUSALS["rank tables"],
    ("[" * 100000, "nested too deep; make the table again"),
    ('{"status": ' + "9" * 5000 + "}", "a number of more digits than Python converts; make the table again"),
    ({"status": "completed", "a\nb": 1}, r"version null with the keys status, 'a\nb' is not"),
    (
        table_0(instance(1, 2, pod_name="pod-" + "9" * 5000), instance(1, pod_name="pod-1")),
        "device_id 0 is there 2 times",
    ),
    (
        table_0(instance(1, rank_id="0"), instance(2)),
        "instance_list[1]: rank_id is missing, which other instances have",
    ),
    (table_0(instance(1, rank_id="0"), instance(2, rank_id="2")), "2 devices have the ranks 0, 2; expected 0 to 1"),
]


@pytest.mark.parametrize(("table", "message"), WRONG)
def test_a_wrong_table_is_refused(tmp_path: Path, samples: Path, table: Any, message: str) -> None:
    path = put(tmp_path, wrong_table(table, samples))
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_table(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_one_server_may_be_loopback_and_without_addresses_and_uneven_ones_are_remarked(tmp_path: Path) -> None:
    only = {"server_id": "127.0.0.1", "device": [{"device_id": 3, "rank_id": 0}]}
    table = read_table(put(tmp_path, {**table_1(), "server_count": 1, "server_list": [only]}))
    (warning,) = table_warnings(table)
    assert re.match(r"server 127\.0\.0\.1 is a loopback address.*--server_ip", warning)
    assert to_json(table)["server_list"] == [{"server_id": "127.0.0.1", "device": [{"device_id": "3", "rank_id": "0"}]}]
    (warning,) = table_warnings(read_table(put(tmp_path, table_1(2, 1))))
    assert "different numbers of devices (10.0.0.1 has 2, 10.0.0.2 has 1)" in warning


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({"host_ip": "172.16.0.100"}, "172.16.0.100"),  # HCCL's guide to 1.0 and 1.2
        ({"host_ip": "172.16.0.100", "container_ip": "192.168.247.11"}, "192.168.247.11"),
        ({"host_ip": "fd00::100", "container_ip": "pod-0"}, "fd00::100"),
        ({"host_ip": "reserve"}, "node_0"),
    ],
)
def test_the_address_is_the_first_field_that_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, str], address: str
) -> None:
    data = table_1()
    data["server_list"][0] |= {"server_id": "node_0", **fields}
    path = put(tmp_path, data)
    table = read_table(path)
    assert table.server_list[0].address == address
    assert find_places(range(2, 4), rank_size=4, table=table).master == address
    assert find_process({"RANK_TABLE_FILE": str(path), "RANK_ID": "3"}).master == address
    assert main(["--check", str(path)]) == 0
    shown = "node_0" if address == "node_0" else f"node_0 ({address})"
    assert f"0 0 192.168.1.1 {shown}\n" in capsys.readouterr().out


# ---- waiting


def test_waiting_ends_when_the_platform_has_filled_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent, half written, initializing, completed: one look each."""
    path, whole = tmp_path / "table.json", json.dumps(table_1())
    states = iter([whole[:50], json.dumps({"status": "initializing"}), whole])
    monkeypatch.setattr(files.time, "sleep", lambda seconds: path.write_text(next(states)))
    assert wait_for_table(path, 3600).world_size == 4
    assert next(states, None) is None


def test_what_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the limit, and a wrong table."""
    with pytest.raises(DataError, match=r"status is 'initializing'.*\(waited 0 s\)"):
        wait_for_table(put(tmp_path, {"status": "initializing"}), 0)
    data = {**table_1(), "super_pod_list": ["?"]}  # a key of a later version
    assert to_json(wait_for_table(put(tmp_path, data), 0)) == data
    monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(DataError, match="server_count is 3"):
        wait_for_table(put(tmp_path, changed('server_count="3"', table_1())), 3600)


# ---- addresses of devices, from files of vendors' guides and a stand-in for the driver's tool


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An hccn_tool on PATH that answers as the driver's; its /etc/hccn.conf is absent."""
    path = tmp_path / "bin" / "hccn_tool"
    path.parent.mkdir()
    answer = 'printf "ipaddr:192.168.7.%s\\nnetmask:255.255.255.0\\n" "$2"'
    path.write_text(f'#!/bin/sh\n[ "$1 $3 $4" = "-i -ip -g" ] || exit 9\n{answer}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setattr(module, "DEFAULT_CONF", tmp_path / "etc.conf")
    return path


def test_the_file_of_eight_devices_and_ipv4_before_ipv6(samples: Path, tmp_path: Path) -> None:
    lines = (samples / "hccn_paddle_8p.conf").read_text().split()
    expected = {int(line[8]): line[10:] for line in lines if line.startswith("address_")}
    assert device_addresses(range(8), samples / "hccn_paddle_8p.conf") == expected
    assert device_addresses([0], samples / "hccn_hixl_mixed.conf") == {0: "192.168.1.10"}
    text = (samples / "hccn_hixl_mixed.conf").read_text().replace("address_0=192.168.1.10\n", "")
    (tmp_path / "six.conf").write_text(text)
    assert device_addresses([0], tmp_path / "six.conf") == {0: "121::101"}


@pytest.mark.parametrize(("text", "message"), REFUSALS["hccn"])
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "conf").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        device_addresses([0], tmp_path / "conf")


def test_the_tool_is_asked_first_unless_a_file_is_named(tool: Path, samples: Path) -> None:
    assert device_addresses([4, 11]) == {4: "192.168.7.4", 11: "192.168.7.11"}
    assert device_addresses([1], samples / "hccn_hixl_gap.conf") == {1: "192.168.1.11"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            '[ "$2" = 0 ] && echo ipaddr:192.168.7.0 && exit 0\necho "no such chip" >&2; exit 3',
            "`hccn_tool -i 1 -ip -g` ended with code 3 and no line `ipaddr:ADDRESS`: no such chip; reading",
        ),
        ("echo ipaddr:192.168.7.0; exit 1", "ended with code 1"),
        ("exec sleep 60", "no answer within 1 s"),
    ],
)
def test_when_the_tool_fails_for_one_device_the_file_serves_all(
    tool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, said: str
) -> None:
    monkeypatch.setattr(module, "_TOOL_SECONDS", 1.0 if "sleep" in script else 20.0)
    tool.write_text(f"#!/bin/sh\n{script}\n")
    text = "address_0_before=10.9.9.9\naddress_0=10.9.0.0\naddress_1=10.9.0.1\n"
    module.DEFAULT_CONF.write_text(text)
    assert device_addresses([0, 1]) == {0: "10.9.0.0", 1: "10.9.0.1"}
    assert said in caplog.text


def test_neither_tool_nor_file(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(DataError, match=r"ended with code 0 .*, and .*etc\.conf: no such file; .*--hccn_conf"):
        device_addresses([0])
    tool.unlink()
    with pytest.raises(DataError, match=r"hccn_tool is not on PATH, and .*etc\.conf: no such file"):
        device_addresses([0])

"""Rank tables of vendors' documents and of a strategy: what is read, written again, refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import common.cluster.rank_table_files as files
from common.cluster.environment import find_process
from common.cluster.places import find_places
from common.cluster.rank_table import table_warnings
from common.cluster.rank_table_files import read_table, to_json, wait_for_table, write_table
from common.errors import DataError
from tests.cluster_tables import devices
from tools.hccl_tools import main


def put(folder: Path, data: Any) -> Path:
    path = folder / "table.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def server(number: int, ranks: range) -> dict[str, Any]:
    addresses = [f"192.168.{number}.{i + 1}" for i in range(len(ranks))]
    held = devices(addresses, first_rank=ranks[0])
    return {"server_id": f"10.0.0.{number}", "device": held, "host_nic_ip": "reserve"}


def table_1() -> dict[str, Any]:
    servers = [server(1, range(0, 2)), server(2, range(2, 4))]
    return {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}


def table_12() -> dict[str, Any]:
    data = {**table_1(), "version": "1.2"}
    held = [device for one in data["server_list"] for device in one["device"]]
    for number, device in enumerate(held):
        device["super_device_id"] = str(1000 + number)
    members = [{"server_id": f"10.0.0.{number}"} for number in (1, 2)]
    data["super_pod_list"] = [{"super_pod_id": "0", "server_list": members}]
    return data


def instance(number: int, count: int = 1, **more: Any) -> dict[str, Any]:
    chips = devices([f"192.168.{number}.{i + 1}" for i in range(count)])
    return {"server_id": f"10.0.0.{number}", "devices": chips, **more}


def chips(number: int, *ranks: str, **more: Any) -> dict[str, Any]:
    """Return an instance whose devices have ranks."""
    found = instance(number, len(ranks), **more)
    found["devices"] = [c | {"rank_id": r} for c, r in zip(found["devices"], ranks, strict=True)]
    return found


def table_0(*instances: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": "completed",
        "group_count": "1",
        "group_list": [{"group_name": "job", "instance_list": list(instances)}],
    }


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
    found = [
        (one.server_id, device.device_id, device.device_ip) for one, device in read_table(put(tmp_path, data)).places()
    ]
    assert found == [("pod", 0, None), ("pod", 1, None), ("pod", 0, None), ("pod", 1, None)]
    second = data["rank_list"][3]["level_list"][0]
    second["net_instance_id"] = "pod2"
    assert [len(one.device) for one in read_table(put(tmp_path, data)).server_list] == [3, 1]


# ---- the order of ranks in a platform's table


@pytest.mark.parametrize(
    ("instances", "hosts"),
    [
        ([instance(1, pod_name="job-10"), instance(2, pod_name="job-9")], ["10.0.0.2", "10.0.0.1"]),
        (
            [instance(1, pod_name="b"), instance(2, pod_name="a"), instance(3, pod_name="w-7")],
            ["10.0.0.3", "10.0.0.1", "10.0.0.2"],
        ),
        (
            [instance(1, pod_name="job-0", rank_id="1"), instance(2, pod_name="job-1", rank_id=0)],
            ["10.0.0.2", "10.0.0.1"],
        ),
        # a rank of a device goes before that of its instance
        ([chips(1, "1", rank_id="1"), chips(2, "0", "2", rank_id="0")], ["10.0.0.2", "10.0.0.1", "10.0.0.2"]),
        ([instance(1, 2, rank_id="7"), instance(2, 2, rank_id="3")], ["10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.1"]),
    ],
)
def test_instances_are_ordered(tmp_path: Path, instances: list[dict[str, Any]], hosts: list[str]) -> None:
    table = read_table(put(tmp_path, table_0(*instances)))
    assert [one.server_id for one, _ in table.places()] == hosts


def test_instances_of_one_server_are_joined_and_unknown_keys_stay(tmp_path: Path) -> None:
    second = {
        **instance(1, rank_id="1"),
        "devices": [{"device_id": "5", "device_ip": "192.168.9.9", "plane": "b"}],
        **{"zone": "z", "pod_names": 3},
    }
    # the last would be wrong in version 1.0
    data = {**table_0(instance(1, rank_id="0"), second), "job_id": "j", "server_count": "9"}
    written = to_json(read_table(put(tmp_path, data)))
    first = {"device_id": "0", "device_ip": "192.168.1.1", "rank_id": "0"}
    chips = [first, {"device_id": "5", "device_ip": "192.168.9.9", "rank_id": "1", "plane": "b"}]
    servers = [{"server_id": "10.0.0.1", "device": chips, "zone": "z", "pod_names": 3}]
    given = {"version": "1.0", "server_count": "1", "server_list": servers}
    assert written == {**given, "status": "completed", "job_id": "j"}


def test_a_key_of_a_later_version_stays(tmp_path: Path) -> None:
    data = {**table_1(), "super_pod_list": ["?"]}
    data["server_list"][0]["pod_names"] = ["?"]
    assert to_json(read_table(put(tmp_path, data))) == data


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


def changed(change: str, of: Any = None) -> Any:
    """Return a table (of two servers) with a change such as ``server_list.0.device=[]``.

    Without a value the key is removed. ``device`` stands for the first device of all.
    """
    data: Any = table_1() if of is None else of
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


def test_lines_of_comment_are_left_out(tmp_path: Path) -> None:
    """Comments as at the head of the sample in MindFormers' documents; a # in a value stays."""
    data = {"version": "1.0", "server_count": "1", "server_list": [server(1, range(2))]}
    data |= {"status": "completed", "note": "# kept"}
    plain = read_table(put(tmp_path, data))
    text = "# 4机32卡参考样例\n" + json.dumps(data, indent=1).replace("{\n", "{\n  # a host\n", 1)
    assert read_table(put(tmp_path, text)) == plain
    assert "# kept" in json.dumps(to_json(plain))


def wrong_table(change: Any, samples: Path) -> Any:
    """Return the text or the table that a row of WRONG is or means."""
    if not isinstance(change, str) or change[:1] in ("{", "["):
        return change
    version, _, rest = change.partition(" ")
    if version == "1.2":
        return changed(rest, table_12())
    if version == "2.0":
        return changed(rest, json.loads((samples / V2).read_text()))
    return changed(rest, table_0(instance(1))) if version == "0" else changed(change)


V2 = "v2.0_rank_list_950_2x2_ipv4.json"
POD = '{"super_pod_id": "%s", "server_list": [{"server_id": "10.0.0.1"}]}'
WRONG = [
    ("status", "status is missing; expected 'completed'"),
    ('status="failed"', 'status is "failed"; expected'),
    ('version="3.0"', 'version "3.0" with the keys version, server_count, server_list, status is not a known'),
    ('server_count="3"', "server_count is 3, but there are 2 servers in server_list"),
    ("server_count", "server_count is missing; make the table again"),
    ("server_list=[]", "server_count is 2, but there are 0"),
    ("server_list.1.device=[]", "server 10.0.0.2 has no devices"),
    ('device.rank_id="1"', "4 devices have the ranks 1, 1-3; expected 0 to 3, each once"),
    ('device.rank_id="4"', "4 devices have the ranks 1-4; expected 0 to 3"),
    ('device.rank_id="-1"', 'device[0]: rank_id: found "-1"; expected a whole number'),
    (f'device.rank_id="{"9" * 30}"', "; expected a whole number"),
    ("device.rank_id", "server_list[0]: device[0]: rank_id is missing"),
    ('device.device_id="1"', "server 10.0.0.1: device_id 1 is there 2 times"),
    ('device.device_ip="192.168.2.1"', "device_ip 192.168.2.1 is also that of rank 0"),
    ('device.device_ip="192.168.1"', "device_ip: '192.168.1' is not an IP address"),
    ('device.device_ip="0.0.0.0"', "device_ip: 0.0.0.0 is not the address of one machine"),
    ('device.device_ip="127.0.0.1"', "device_ip 127.0.0.1 is a loopback address"),
    ("device.device_ip", "has no device_ip, which several servers need; `hccn_tool"),
    ('server_list.0.server_id="10.0.0.2"', "server 10.0.0.2 is there 2 times"),
    ('server_list.0.server_id="a\\nb"', r'server_id: found "a\nb"; expected non-empty printable'),
    ('server_list.0.server_id="127.0.1.1"', "server 127.0.1.1 is a loopback address"),
    ('server_list.0.server_id="localhost"', "server localhost is a loopback address"),
    (f"1.2 super_pod_list=[{POD % 0}, {POD % 0}]", "pods 0, 0 with the servers 10.0.0.1, 10.0.0.1"),
    (f"1.2 super_pod_list=[{POD % 0}]", "has the pods 0 with the servers 10.0.0.1; version 1.2"),
    ("1.2 super_pod_list", "super_pod_list is missing"),
    ('1.2 device.super_device_id="1001"', "super pod 0: super_device_id 1001 is there 2 times"),
    ("1.2 device.super_device_id", "rank 0 has no super_device_id, which version 1.2 needs"),
    ('0 group_count="2"', "group_count is 2, but there are 1 groups"),
    ('0 group_list.0.device_count="2"', "group_list[0]: device_count is 2, but there are 1"),
    ("2.0 rank_count=5", "rank_count is 5, but there are 4 ranks"),
    ("2.0 rank_list.1.local_id=0", "rank_list[1]: local_id 0 occurs twice in the network instance"),
    ("2.0 rank_list.1.level_list=[]", "rank_list[1]: level_list: found []; List should have at least 1 item"),
    ("{", "table.json, line 1, column 2: not valid JSON"),
    ("[]", "table.json: found []; expected a JSON object"),
    ('{"a": 1, "a": 2}', "the key 'a' is given twice in one object; make the table again"),
    ("[" * 100000, "nested deeper than 64 levels; make the table again"),
    ('{"status": ' + "9" * 5000 + "}", "a number of more digits than Python converts; make the table again"),
    ({"status": "completed", "a\nb": 1}, r"version null with the keys status, 'a\nb' is not"),
    (
        table_0(instance(1, 2, pod_name="pod-" + "9" * 5000), instance(1, 1, pod_name="pod-1")),
        "device_id 0 is there 2 times",
    ),
    (
        changed('server_list.1.device.0.device_ip="fd00:0:0::1"', changed('device.device_ip="fd00::1"')),
        "rank 2 (device 0 of 10.0.0.2): device_ip fd00::1 is also that of rank 0",
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


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A byte order mark is skipped."""
    with pytest.raises(DataError, match=r"absent\.json: no such file; make a rank table with"):
        read_table(tmp_path / "absent.json")
    (tmp_path / "table.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(table_1()).encode())
    assert read_table(tmp_path / "table.json").world_size == 4


def test_one_server_may_be_loopback_and_without_addresses(tmp_path: Path) -> None:
    only = {"server_id": "127.0.0.1", "device": [{"device_id": 3, "rank_id": 0}]}
    table = read_table(put(tmp_path, {**table_1(), "server_count": 1, "server_list": [only]}))
    (warning,) = table_warnings(table)
    assert re.match(r"server 127\.0\.0\.1 is a loopback address.*--server_ip", warning)
    assert to_json(table)["server_list"] == [{"server_id": "127.0.0.1", "device": [{"device_id": "3", "rank_id": "0"}]}]


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
    first = {**server(1, range(0, 2)), "server_id": "node_0", **fields}
    path = put(tmp_path, {**table_1(), "server_list": [first, server(2, range(2, 4))]})
    table = read_table(path)
    assert table.server_list[0].address == address
    assert find_places(range(2, 4), rank_size=4, table=table).master == address
    assert find_process({"RANK_TABLE_FILE": str(path), "RANK_ID": "3"}).master == address
    assert main(["--check", str(path)]) == 0
    shown = "node_0" if address == "node_0" else f"node_0 ({address})"
    assert f"0 0 192.168.1.1 {shown}\n" in capsys.readouterr().out


def test_uneven_servers_are_remarked(tmp_path: Path) -> None:
    data = {**table_1(), "server_list": [server(1, range(0, 2)), server(2, range(2, 3))]}
    (warning,) = table_warnings(read_table(put(tmp_path, data)))
    assert "different numbers of devices (10.0.0.1 has 2, 10.0.0.2 has 1)" in warning


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
    monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(DataError, match="server_count is 3"):
        wait_for_table(put(tmp_path, changed('server_count="3"')), 3600)

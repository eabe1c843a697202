"""Rank tables of vendors' documents and of a strategy: what is read, written again, refused."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import common.cluster.rank_table_files as files
from common.cluster.environment import find_process
from common.cluster.places import find_places
from common.cluster.rank_table import (
    RankTable,
    Server,
    SuperPod,
    TableDevice,
    table_warnings,
    validate,
)
from common.cluster.rank_table_files import read_table, to_json, wait_for_table, write_table
from common.errors import DataError
from tools.hccl_tools import main


def put(folder: Path, data: Any) -> Path:
    path = folder / "table.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def server(number: int, ranks: range) -> dict[str, Any]:
    devices = [
        {"device_id": str(i), "device_ip": f"192.168.{number}.{i + 1}", "rank_id": str(rank)}
        for i, rank in enumerate(ranks)
    ]
    return {"server_id": f"10.0.0.{number}", "device": devices, "host_nic_ip": "reserve"}


def table_1() -> dict[str, Any]:
    servers = [server(1, range(0, 2)), server(2, range(2, 4))]
    return {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}


def table_12() -> dict[str, Any]:
    data = {**table_1(), "version": "1.2"}
    for number, device in enumerate(
        device for one in data["server_list"] for device in one["device"]
    ):
        device["super_device_id"] = str(1000 + number)
    data["super_pod_list"] = [
        {
            "super_pod_id": "0",
            "server_list": [{"server_id": f"10.0.0.{number}"} for number in (1, 2)],
        }
    ]
    return data


def instance(number: int, devices: int = 1, **more: Any) -> dict[str, Any]:
    chips = [
        {"device_id": str(i), "device_ip": f"192.168.{number}.{i + 1}"} for i in range(devices)
    ]
    return {"server_id": f"10.0.0.{number}", "devices": chips, **more}


def table_0(*instances: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": "completed",
        "group_count": "1",
        "group_list": [{"group_name": "job", "instance_list": list(instances)}],
    }


# ---- the samples


@pytest.mark.parametrize(
    "name",
    [
        "v1.0_mindformers_1x8",
        "v1.0_merge_hccl_2x8",
        "v1.0_modelarts_generated_2x8_nohostnic",
        "v1.2_a3_superpod_1x16",
    ],
)
def test_a_sample_keeps_every_value_when_written_again(
    samples: Path, tmp_path: Path, name: str
) -> None:
    """Keys that only some tables have (host_nic_ip, container_ip) stay, and none is added."""
    source = samples / f"{name}.json"
    data = json.loads(source.read_text())
    table = read_table(source)
    write_table(table, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == data
    expected = [
        (one["server_id"], d["device_id"], d["device_ip"])
        for one in data["server_list"]
        for d in one["device"]
    ]
    assert [
        (one.server_id, str(device.device_id), device.device_ip) for one, device in table.places()
    ] == expected


def test_the_platform_table_becomes_the_one_its_launcher_makes(samples: Path) -> None:
    """Pods are listed 1, 0: the rank order follows their names."""
    table = read_table(samples / "v0_modelarts_k8s_jobstart_2x8_unordered.json")
    assert to_json(table) == json.loads(
        (samples / "v1.0_modelarts_generated_2x8_nohostnic.json").read_text()
    )


def test_a_platform_table_of_one_device(samples: Path) -> None:
    [(one, device)] = read_table(samples / "v0_modelarts_cce_1x1.json").places()
    assert (one.server_id, device) == (
        "192.168.6.101",
        TableDevice(rank_id=0, device_id=0, device_ip="192.1.244.169"),
    )


def test_version_2_is_read_and_not_written(samples: Path) -> None:
    table = read_table(samples / "v2.0_rank_list_950_2x2_ipv4.json")
    assert [
        (one.server_id, device.device_id, device.device_ip) for one, device in table.places()
    ] == [
        ("az0-rack0-pod0", 0, "172.16.0.10"),
        ("az0-rack0-pod0", 1, "172.16.0.28"),
        ("az0-rack0-pod1", 0, "172.16.1.10"),
        ("az0-rack0-pod1", 1, "172.16.1.28"),
    ]
    with pytest.raises(DataError, match=r"version 2\.0 names no servers.*msrun"):
        to_json(table)


def test_a_network_instance_may_span_machines_and_have_other_addresses(
    samples: Path, tmp_path: Path
) -> None:
    """One instance of four ranks: device ids repeat, local ids do not. An EID
    is not an IP address.
    """
    data = json.loads((samples / "v2.0_rank_list_950_2x2_ipv4.json").read_text())
    for number, entry in enumerate(data["rank_list"]):
        entry["local_id"] = number
        entry["level_list"][0]["net_instance_id"] = "pod"
        entry["level_list"][0]["rank_addr_list"][0] |= {"addr_type": "EID", "addr": f"00:0{number}"}
    found = [
        (one.server_id, device.device_id, device.device_ip)
        for one, device in read_table(put(tmp_path, data)).places()
    ]
    assert found == [("pod", 0, None), ("pod", 1, None), ("pod", 0, None), ("pod", 1, None)]
    second = data["rank_list"][3]["level_list"][0]
    second["net_instance_id"] = "pod2"
    assert [len(one.devices) for one in read_table(put(tmp_path, data)).servers] == [3, 1]


def test_a_table_that_is_not_filled_yet(samples: Path) -> None:
    with pytest.raises(
        DataError, match=r"status_initializing\.json: status is 'initializing'.*try again"
    ):
        read_table(samples / "status_initializing.json")


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
        (
            [instance(1, 2, rank_id="7"), instance(2, 2, rank_id="3")],
            ["10.0.0.2", "10.0.0.2", "10.0.0.1", "10.0.0.1"],
        ),
    ],
)
def test_instances_are_ordered(
    tmp_path: Path, instances: list[dict[str, Any]], hosts: list[str]
) -> None:
    table = read_table(put(tmp_path, table_0(*instances)))
    assert [one.server_id for one, _ in table.places()] == hosts


def test_a_rank_of_a_device_goes_before_that_of_its_instance(tmp_path: Path) -> None:
    instances = [instance(1, 2, rank_id="0"), instance(2, 1, rank_id="1")]
    for device, rank in zip(
        [*instances[0]["devices"], *instances[1]["devices"]], "201", strict=True
    ):
        device["rank_id"] = rank
    places = read_table(put(tmp_path, table_0(*instances))).places()
    assert [device.device_ip for _, device in places] == [
        "192.168.1.2",
        "192.168.2.1",
        "192.168.1.1",
    ]


def test_instances_of_one_server_are_joined_and_unknown_keys_stay(tmp_path: Path) -> None:
    second = {
        **instance(1, rank_id="1"),
        "devices": [{"device_id": "5", "device_ip": "192.168.9.9", "plane": "b"}],
        "zone": "z",
    }
    # the last would be wrong in version 1.0
    data = {**table_0(instance(1, rank_id="0"), second), "job_id": "j", "server_count": "9"}
    written = to_json(read_table(put(tmp_path, data)))
    first = {"device_id": "0", "device_ip": "192.168.1.1", "rank_id": "0"}
    chips = [first, {"device_id": "5", "device_ip": "192.168.9.9", "rank_id": "1", "plane": "b"}]
    servers = [{"server_id": "10.0.0.1", "device": chips, "zone": "z"}]
    assert written == {
        "version": "1.0",
        "server_count": "1",
        "server_list": servers,
        "status": "completed",
        "job_id": "j",
    }


def test_a_key_of_a_later_version_stays(tmp_path: Path) -> None:
    data = {**table_1(), "super_pod_list": ["?"]}
    assert to_json(read_table(put(tmp_path, data))) == data


# ---- any table


_VALUES = st.one_of(st.text(max_size=3), st.integers(), st.just([1]))
_EXTRA = st.dictionaries(st.from_regex(r"x_[a-z]{1,3}", fullmatch=True), _VALUES, max_size=2)


@st.composite
def tables(draw: st.DrawFn) -> RankTable:
    """Servers of any size, ranks in any order, addresses of both families, unknown keys on every
    level.
    """
    version = draw(st.sampled_from(["1.0", "1.2"]))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = draw(st.permutations(range(sum(sizes))))
    octets = draw(
        st.lists(st.integers(1, 2**24 - 1), min_size=len(ranks), max_size=len(ranks), unique=True)
    )
    servers = []
    for number, size in enumerate(sizes):
        ids = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size, unique=True))
        devices = []
        for device_id in ids:
            rank = ranks[sum(sizes[:number]) + len(devices)]
            address = (
                IPv4Address((10 << 24) + octets[rank])
                if draw(st.booleans())
                else IPv6Address((0xFD << 120) + octets[rank])
            )
            super_id = str(rank) if version == "1.2" else None
            extra = draw(_EXTRA)
            devices.append(
                TableDevice(
                    rank_id=rank,
                    device_id=device_id,
                    device_ip=str(address),
                    super_device_id=super_id,
                    extra=extra,
                )
            )
        nic = draw(st.sampled_from([None, "reserve"]))
        servers.append(
            Server(
                server_id=f"10.0.0.{number}",
                devices=tuple(devices),
                host_nic_ip=nic,
                extra=draw(_EXTRA),
            )
        )
    members = {one.server_id: draw(_EXTRA) for one in servers}
    pods = (
        (SuperPod(super_pod_id="0", servers=members, extra=draw(_EXTRA)),)
        if version == "1.2"
        else ()
    )
    return RankTable(
        version=version, servers=files.in_rank_order(servers), super_pods=pods, extra=draw(_EXTRA)
    )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(table=tables(), shuffle=st.randoms(use_true_random=False))
def test_written_sections_are_read_again_in_any_order(
    tmp_path: Path, table: RankTable, shuffle: Any
) -> None:
    path = tmp_path / "table.json"
    write_table(table, path)
    assert read_table(path) == table
    data = json.loads(path.read_text())
    by_rank = {
        int(d["rank_id"]): (one["server_id"], d["device_ip"])
        for one in data["server_list"]
        for d in one["device"]
    }
    shuffle.shuffle(data["server_list"])
    for one in data["server_list"]:
        shuffle.shuffle(one["device"])
    shuffled = read_table(put(tmp_path, data))
    assert shuffled == table
    assert [(one.server_id, device.device_ip) for one, device in shuffled.places()] == [
        by_rank[rank] for rank in range(len(by_rank))
    ]
    assert table.world_size == len(by_rank)


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 3),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.sampled_from("01"),
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_table_is_read_or_refused_in_one_line(
    tmp_path: Path, data: st.DataObject
) -> None:
    """One value of a table replaced by any JSON: never another exception, and never an invalid
    table.
    """
    table = deepcopy(
        data.draw(
            st.sampled_from(
                [table_1(), table_12(), table_0(instance(1, 2, pod_name="a-0"), instance(2, 2))]
            )
        )
    )
    holder: Any = table
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(holder[key], dict | list) or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = data.draw(_JSON)
    path = put(tmp_path, table)
    try:
        read = read_table(path)
    except DataError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
    else:
        assert sorted(device.rank_id for _, device in read.places()) == list(range(read.world_size))


# ---- what is wrong


def changed(*path: Any, to: Any, of: dict[str, Any] | None = None) -> dict[str, Any]:
    data = of or table_1()
    holder: Any = data
    for key in path[:-1]:
        holder = holder[key]
    if to is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = to
    return data


def test_lines_of_comment_are_left_out(tmp_path: Path) -> None:
    """Comments as at the head of the sample in MindFormers' documents; a # in a value stays."""
    data = {"version": "1.0", "server_count": "1", "server_list": [server(1, range(2))]}
    data |= {"status": "completed", "note": "# kept"}
    plain = read_table(put(tmp_path, data))
    text = "# 4机32卡参考样例\n" + json.dumps(data, indent=1).replace("{\n", "{\n  # a host\n", 1)
    assert read_table(put(tmp_path, text)) == plain
    assert "# kept" in json.dumps(to_json(plain))


_PODS = [
    {"super_pod_id": str(number), "server_list": [{"server_id": "10.0.0.1"}]} for number in range(2)
]
_FIRST = ("server_list", 0, "device", 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", r"table\.json, line 1, column 2: not valid JSON"),
        ("[]", r"table\.json: found \[\]; expected a JSON object"),
        (
            '{"a": 1, "a": 2}',
            r"table\.json: the key 'a' is given twice in one object; make the table again",
        ),
        ("[" * 100000, r"table\.json: nested deeper than 64 levels; make the table again"),
        (
            '{"status": ' + "9" * 5000 + "}",
            r"table\.json: a number of more digits than Python converts; make the table again",
        ),
        (
            table_0(
                {**instance(1, 2), "pod_name": "pod-" + "9" * 5000},
                {**instance(1, 1), "pod_name": "pod-1"},
            ),
            "device_id 0 is there 2 times",
        ),
        (
            {"status": "completed", "version": "3.0"},
            r'version "3\.0" with the keys status, version is not a known rank table.*msrun',
        ),
        (changed("status", to=None), "status is missing; expected 'completed'"),
        (changed("status", to="failed"), 'status is "failed"; expected'),
        (
            changed("server_count", to="3"),
            "server_count is 3, but there are 2 servers in server_list",
        ),
        (
            changed("server_count", to=None),
            "server_count is missing; found the keys version, server_list, status",
        ),
        (changed("server_list", to=[]), "server_count is 2, but there are 0"),
        (changed("server_list", 1, "device", to=[]), r"server 10\.0\.0\.2 has no devices"),
        (
            changed(*_FIRST, "rank_id", to="1"),
            r"rank 1 is given 2 times \(device 0 of 10\.0\.0\.1, device 1 of 10\.0\.0\.1\)",
        ),
        (
            changed(*_FIRST, "rank_id", to="4"),
            "rank 0 is missing below rank 1; 4 devices have ranks 0 to 3",
        ),
        (
            changed(*_FIRST, "rank_id", to="-1"),
            r'server_list\[0\]: device\[0\]: rank_id: found "-1"; expected a whole number',
        ),
        (changed(*_FIRST, "rank_id", to=True), "rank_id: found true; expected a whole number"),
        (changed(*_FIRST, "rank_id", to="9" * 30), "rank_id: found .*; expected a whole number"),
        (
            changed(*_FIRST, "rank_id", to=None),
            r"server_list\[0\]: device\[0\]: rank_id is missing; found the keys device_id,"
            r" device_ip",
        ),
        (
            changed(*_FIRST, "device_id", to="1"),
            r"server 10\.0\.0\.1: device_id 1 is there 2 times",
        ),
        (
            changed(*_FIRST, "device_ip", to="192.168.2.1"),
            r"rank 2 \(device 0 .*: device_ip 192\.168\.2\.1 is also that of rank 0",
        ),
        (
            changed(*_FIRST, "device_ip", to="192.168.1"),
            r"rank 0 .*device_ip: '192\.168\.1' is not an IP address",
        ),
        (
            changed(*_FIRST, "device_ip", to="0.0.0.0"),
            r"device_ip: 0\.0\.0\.0 is not the address of one machine",
        ),
        (
            changed(*_FIRST, "device_ip", to="127.0.0.1"),
            r"device_ip 127\.0\.0\.1 is a loopback address",
        ),
        (
            changed(*_FIRST, "device_ip", to=None),
            "rank 0 .* has no device_ip, which several servers need; `hccn_tool",
        ),
        (
            changed("server_list", 0, "server_id", to="10.0.0.2"),
            r"server 10\.0\.0\.2 is there 2 times",
        ),
        (
            changed("server_list", 0, "server_id", to=""),
            r'server_list\[0\]: server_id: found ""; expected non-empty printable text',
        ),
        (
            changed("server_list", 0, "server_id", to="a\nb"),
            r'server_id: found "a\\nb"; expected non-empty printable text',
        ),
        (
            {"status": "completed", "a\nb": 1},
            r"version null with the keys status, 'a\\nb' is not a known",
        ),
        (
            changed("server_list", 0, "server_id", to="127.0.1.1"),
            r"server 127\.0\.1\.1 is a loopback address.*--server_ip",
        ),
        (
            changed("server_list", 0, "server_id", to="localhost"),
            "server localhost is a loopback address",
        ),
        (
            changed(*_FIRST, "device_ip", to="224.0.0.1"),
            r"device_ip: 224\.0\.0\.1 is not the address of one machine",
        ),
        (
            changed("super_pod_list", to=_PODS[:1] * 2, of=table_12()),
            "super_pod_id 0 is there 2 times",
        ),
        (
            changed("super_pod_list", to=_PODS, of=table_12()),
            r"super_pod_list: server 10\.0\.0\.1 is there 2 times",
        ),
        (changed("super_pod_list", to=None, of=table_12()), "super_pod_list is missing"),
        (
            changed(
                "super_pod_list", 0, "server_list", to=[{"server_id": "10.0.0.1"}], of=table_12()
            ),
            r"10\.0\.0\.2 is in server_list but not in super",
        ),
        (
            changed(*_FIRST, "super_device_id", to="1001", of=table_12()),
            "super pod 0: super_device_id 1001 is there 2 times",
        ),
        (
            changed(*_FIRST, "super_device_id", to=None, of=table_12()),
            "rank 0 has no super_device_id, which version 1.2 needs",
        ),
        (
            changed("group_count", to="2", of=table_0(instance(1))),
            "group_count is 2, but there are 1 groups",
        ),
        (
            table_0(instance(1, rank_id="0"), instance(2)),
            r"instance_list\[1\]: rank_id is missing, which other instances have",
        ),
        (
            table_0(instance(1, rank_id="0"), instance(2, rank_id="2")),
            "rank 1 is missing below rank 2",
        ),
        (
            table_0(instance(1, 2), instance(1, 1)),
            r"server 10\.0\.0\.1: device_id 0 is there 2 times",
        ),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, data: Any, message: str) -> None:
    path = put(tmp_path, data)
    with pytest.raises(DataError, match=message) as caught:
        read_table(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_counts_of_version_0_and_2_are_checked(samples: Path, tmp_path: Path) -> None:
    data = json.loads((samples / "v0_modelarts_cce_1x1.json").read_text())
    with pytest.raises(
        DataError, match=r"group_list\[0\]: device_count is 2, but there are 1 devices"
    ):
        read_table(put(tmp_path, changed("group_list", 0, "device_count", to="2", of=data)))
    data = json.loads((samples / "v2.0_rank_list_950_2x2_ipv4.json").read_text())
    with pytest.raises(DataError, match="rank_count is 5, but there are 4 ranks"):
        read_table(put(tmp_path, changed("rank_count", to=5, of=data)))
    with pytest.raises(
        DataError,
        match=r"rank_list\[1\]: local_id 0 occurs twice in the network instance az0-rack0-pod0",
    ):
        read_table(
            put(
                tmp_path,
                {
                    **data,
                    "rank_list": [{**item, "local_id": 0} for item in data["rank_list"]],
                    "rank_count": 4,
                },
            )
        )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"absent\.json: no such file; make a rank table with tools/hccl_tools",
    ):
        read_table(tmp_path / "absent.json")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_table(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="byte 0 is not UTF-8"):
        read_table(tmp_path / "binary")


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(table_1()).encode())
    assert read_table(tmp_path / "table.json").world_size == 4


def test_one_server_may_be_loopback_and_without_addresses(tmp_path: Path) -> None:
    data = {
        **table_1(),
        "server_count": 1,
        "server_list": [{"server_id": "127.0.0.1", "device": [{"device_id": 3, "rank_id": 0}]}],
    }
    table = read_table(put(tmp_path, data))
    assert [
        re.match(r"server 127\.0\.0\.1 is a loopback address.*--server_ip", text) is not None
        for text in table_warnings(table)
    ] == [True]
    assert to_json(table)["server_list"] == [
        {"server_id": "127.0.0.1", "device": [{"device_id": "3", "rank_id": "0"}]}
    ]


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
    assert table.servers[0].address == address
    assert find_places(range(2, 4), rank_size=4, table=table).master == address
    assert find_process({"RANK_TABLE_FILE": str(path), "RANK_ID": "3"}).master == address
    assert main(["--check", str(path)]) == 0
    shown = "node_0" if address == "node_0" else f"node_0 ({address})"
    assert f"0 0 192.168.1.1 {shown}\n" in capsys.readouterr().out


def test_uneven_servers_are_remarked(tmp_path: Path) -> None:
    data = {**table_1(), "server_list": [server(1, range(0, 2)), server(2, range(2, 3))]}
    assert table_warnings(read_table(put(tmp_path, data))) == [
        "servers hold different numbers of devices (10.0.0.1 has 2, 10.0.0.2 has 1); most"
        " collectives expect the same number"
    ]


def test_the_place_of_a_rank(tmp_path: Path) -> None:
    table = read_table(put(tmp_path, table_1()))
    one, device = table.place(3)
    assert (one.server_id, device.device_id) == ("10.0.0.2", 1)
    for rank in (-1, 4):
        with pytest.raises(
            DataError, match=rf"rank {rank} is not in the rank table, which holds ranks 0 to 3"
        ):
            table.place(rank)


def test_equal_addresses_in_two_spellings(tmp_path: Path) -> None:
    table = read_table(put(tmp_path, table_1()))
    spelled = iter(["fd00::1", "fd00:0:0::1", "fd00::2", "fd00::3"])
    servers = tuple(
        replace(one, devices=tuple(replace(d, device_ip=next(spelled)) for d in one.devices))
        for one in table.servers
    )
    with pytest.raises(DataError, match=r"here: rank 1 .*device_ip fd00::1 is also that of rank 0"):
        validate(replace(table, servers=servers), "here")


# ---- waiting


def test_waiting_ends_when_the_platform_has_filled_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absent, half written, initializing, completed: one look each."""
    path, whole = tmp_path / "table.json", json.dumps(table_1())
    states = iter([whole[:50], json.dumps({"status": "initializing"}), whole])
    monkeypatch.setattr(files.time, "sleep", lambda seconds: path.write_text(next(states)))
    assert wait_for_table(path, 3600).world_size == 4
    assert next(states, None) is None


def test_waiting_has_a_limit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"status is 'initializing'.*\(waited 0 s\)"):
        wait_for_table(put(tmp_path, {"status": "initializing"}), 0)


def test_a_wrong_table_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(DataError, match="server_count is 3"):
        wait_for_table(put(tmp_path, changed("server_count", to="3")), 3600)

"""Ranges and places, against the numbers of the tutorial of MindFormers' run_distribute.sh; runs
that the environment of a pod and a mounted rank table describe.
"""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.cluster.environment import place_of_pod
from common.cluster.places import RankPlacement, find_places, parse_range, server_of_pod
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import read_table
from common.errors import ConfigError
from common.launcher.request import DistributeOptions, parse_distribute
from tests.cluster_tables import table_1, tutorial_servers, write_tutorial_table

REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.fixture
def tutorial(tmp_path: Path) -> RankTable:
    return read_table(write_tutorial_table(tmp_path / "hccl_4s_32p.json"))


@pytest.mark.parametrize("text", ["[8,16)", "[8,16]", " [ 8 , 16 ) ", "[08,16]"])
def test_the_end_is_exclusive_however_it_is_written(text: str) -> None:
    assert list(parse_range(text)) == [8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(("text", "message"), REFUSALS["ranges"])
def test_a_range_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_range(text)


@pytest.mark.parametrize(("start", "end"), [(0, 8), (8, 16), (16, 24), (24, 32)])
def test_ranks_of_a_server_of_the_table(tutorial: RankTable, start: int, end: int) -> None:
    places = find_places(range(start, end), rank_size=32, table=tutorial)
    assert [(place.rank, place.device_id, place.local_rank) for place in places.own] == [
        (start + number, number, number) for number in range(8)
    ]
    assert places.own_host == f"10.155.111.{140 + start // 8}"
    assert (places.master, places.world_size) == ("10.155.111.140", 32)


def test_without_a_table() -> None:
    one = find_places(range(4, 6)).all
    assert [(place.rank, place.device_id) for place in one] == [(0, 4), (1, 5)]
    assert {place.host for place in one} == {"127.0.0.1"}
    several = find_places(range(4, 6), master="10.0.0.1", nodes=3, node_rank=2)
    assert several.own == (
        RankPlacement(rank=4, device_id=4, local_rank=0, host="node 2"),
        RankPlacement(rank=5, device_id=5, local_rank=1, host="node 2"),
    )
    assert several.world_size == 6 and several.hosts == ("10.0.0.1", "node 1", "node 2")
    by_ranks = find_places(range(8, 16), rank_size=32, master="10.0.0.1").own
    assert [(place.rank, place.device_id) for place in by_ranks] == [(8 + n, n) for n in range(8)]


def test_version_2_names_no_machines(samples: Path) -> None:
    table = read_table(samples / "v2.0_rank_list_950_2x2_ipv4.json")
    places = find_places(range(2, 4), rank_size=4, table=table, master="10.0.0.1")
    assert [place.rank for place in places.own] == [2, 3] and places.hosts == ("10.0.0.1", "node 1")
    with pytest.raises(ConfigError, match="--nnodes and --node_rank are for RANK_TABLE none"):
        find_places(range(2, 4), rank_size=4, table=table, nodes=2)


def test_a_range_of_devices_is_that_of_the_server_with_an_address_of_this_machine(
    tutorial: RankTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"10.155.111.142"}
    monkeypatch.setattr("common.cluster.places.is_here", own.__contains__)
    assert find_places(range(8), table=tutorial) == find_places(range(16, 24), rank_size=32, table=tutorial)
    remedy = r"devices 0-7; make a table .* with tools/hccl_tools.py --device_num '\[0,4\)'"
    with pytest.raises(ConfigError, match=rf"holds for 10\.155\.111\.142, {remedy}"):
        find_places(range(4), table=tutorial)
    own.add("10.155.111.140")
    with pytest.raises(ConfigError, match=r"10\.155\.111\.140 and 10\.155\.111\.142 has"):
        find_places(range(8), table=tutorial)


@pytest.mark.parametrize(("text", "rank_size", "more", "message"), REFUSALS["places"])
def test_ranges_that_contradict_the_table_or_each_other(
    tutorial: RankTable, text: str, rank_size: int | None, more: dict[str, Any] | None, message: str
) -> None:
    table = tutorial if more is None else None
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_places(parse_range(text), rank_size=rank_size, table=table, **(more or {}))


# ---- what the environment of a pod and a mounted rank table say ----

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
OLD = {"MASTER_ADDR": "gpt2-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
NEW = OLD | {"WORLD_SIZE": "24", "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8"}
"""Variables of a worker with training-operator 1.9 and nprocPerNode 8.

RANK counts pods, WORLD_SIZE ranks.
"""
TRAINER = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", **POD}
"""Variables of Kubeflow's trainer: torchrun is to set the others."""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (NEW, (3, 2, "gpt2-master-0", 23456)),
        ({**POD, **OLD}, (3, 2, "gpt2-master-0", 23456)),
        ({**NEW, "MASTER_PORT": ""}, (3, 2, "gpt2-master-0", 29500)),
        # the first operators told the master localhost
        ({**POD, **OLD, "MASTER_ADDR": "localhost", "RANK": "0"}, (3, 0, socket.gethostname(), 23456)),
        ({**TRAINER, "PET_MASTER_PORT": "29400"}, (2, 0, "a", 29400)),
        # one host; outside pods, variables of an earlier launch in a shell mean nothing
        *((environ, None) for environ in (POD, OLD, {**NEW, "PET_NNODES": "1"}, {**POD, **OLD, "WORLD_SIZE": "1"})),
    ],
)
def test_hosts_of_a_job(environ: dict[str, str], expected: tuple[int, int, str, int] | None) -> None:
    place = place_of_pod(environ)
    assert (place and (place.world_size, place.rank, place.master, place.port)) == expected


@pytest.mark.parametrize(("change", "said"), REFUSALS["pods"])
def test_variables_that_cannot_be(change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_of_pod({**NEW, **change})


@pytest.mark.parametrize(("name", "value"), [("XDL_IP", "10.0.0.2"), ("POD_IP", "172.16.0.2")])
def test_the_server_that_a_pod_is(tmp_path: Path, name: str, value: str) -> None:
    data = table_1(*tutorial_servers(2, 2, first_device=4))
    for number, entry in enumerate(data["server_list"], 1):  # as MindCluster writes it
        entry |= {"server_id": f"10.0.0.{number}", "container_ip": f"172.16.0.{number}"}
    (tmp_path / "hccl.json").write_text(json.dumps(data))
    table = read_table(tmp_path / "hccl.json")
    assert server_of_pod(table, {**POD, "HOSTNAME": "gpt2-worker-1", "POD_IP": "172.16.0.9"}) is None
    server = server_of_pod(table, {**POD, "HOSTNAME": "gpt2-worker-1", name: value})
    assert server is not None and server.server_id == "10.0.0.2"
    assert server_of_pod(table, {name: value}) is None, "not in a pod"
    places = find_places(range(2), table=table, pod=server)
    assert places.master == "172.16.0.1" and places.own_host == "172.16.0.2"
    # devices as the driver counts them in the container; those of the table are the node's
    assert [(place.rank, place.device_id) for place in places.own] == [(2, 0), (3, 1)]
    places = find_places((4, 5), table=table, pod=server)
    assert [(place.rank, place.device_id) for place in places.own] == [(2, 4), (3, 5)]
    with pytest.raises(ConfigError, match="is not what the rank table holds"):
        find_places(range(4), table=table, pod=server)


def test_the_only_server_and_pod_names_of_version_0(tmp_path: Path, samples: Path) -> None:
    path = tmp_path / "hccl.json"
    one = read_table(write_tutorial_table(path, servers=1, devices=4, first_device=4))
    places = find_places(range(4), table=one, pod=server_of_pod(one, POD))
    assert [place.device_id for place in places.own] == [0, 1, 2, 3]
    table = read_table(samples / "v0_modelarts_k8s_jobstart_2x8_unordered.json")
    server = server_of_pod(table, {**POD, "HOSTNAME": "fake-job-pod-1"})
    assert server is not None and server.server_id == "10.19.1.79"
    assert [place.rank for place in find_places(range(8), table=table, pod=server).own] == list(range(8, 16))


def test_a_mounted_table_may_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("seed: 1\n")

    def parsed(table: Path) -> Path | None:
        options = DistributeOptions(words=(str(table), str(config), "[0,1]", "train"))
        return parse_distribute(options, ["train"], ()).table

    with pytest.raises(ConfigError, match="is not a file"):
        parsed(tmp_path / "hccl.json")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert parsed(tmp_path / "hccl.json") == tmp_path / "hccl.json"
    with pytest.raises(ConfigError, match="is not a file"):
        parsed(tmp_path / "absent" / "hccl.json")

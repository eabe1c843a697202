"""Runs that the environment of a pod and a mounted rank table describe."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from common.cluster.environment import place_of_pod
from common.cluster.places import find_places, server_of_pod
from common.cluster.rank_table_files import read_table
from common.errors import ConfigError
from common.launcher.request import DistributeOptions, parse_distribute
from tests.cluster_tables import table_1, tutorial_servers, write_tutorial_table

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
NEW = {
    **{"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8"},
    **{"MASTER_ADDR": "gpt2-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "24", "RANK": "2"},
}
"""Variables of a worker with training-operator 1.9 and nprocPerNode 8.

RANK counts pods, WORLD_SIZE ranks.
"""
OLD = {"MASTER_ADDR": "gpt2-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}


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
        *((environ, None) for environ in ({}, POD, OLD, {**NEW, "PET_NNODES": "1"})),
        ({**POD, **OLD, "WORLD_SIZE": "1"}, None),
    ],
)
def test_hosts_of_a_job(environ: dict[str, str], expected: tuple[int, int, str, int] | None) -> None:
    place = place_of_pod(environ)
    assert (place and (place.world_size, place.rank, place.master, place.port)) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"PET_NNODES": "1:4"}, "the job is elastic; remove elasticPolicy"),
        ({"PET_NNODES": "two"}, "PET_NNODES=two: expected the number of processes, 1 or more"),
        ({"PET_NODE_RANK": "3"}, "PET_NODE_RANK=3, but there are 3 processes: expected 0 to 2"),
        ({"PET_NODE_RANK": "", "RANK": ""}, "RANK is not set"),
        ({"MASTER_ADDR": ""}, "neither MASTER_ADDR nor PET_MASTER_ADDR is set"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
    ],
)
def test_variables_that_cannot_be(change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_of_pod({**NEW, **change})


@pytest.mark.parametrize(
    ("name", "value"), [("XDL_IP", "10.0.0.2"), ("POD_IP", "172.16.0.2"), ("POD_IP", "172.16.0.9")]
)
def test_the_server_that_a_pod_is(tmp_path: Path, name: str, value: str) -> None:
    data = table_1(*tutorial_servers(2, 2, first_device=4))
    for number, entry in enumerate(data["server_list"], 1):  # as MindCluster writes it
        entry |= {"server_id": f"10.0.0.{number}", "container_ip": f"172.16.0.{number}"}
    (tmp_path / "hccl.json").write_text(json.dumps(data))
    table = read_table(tmp_path / "hccl.json")
    server = server_of_pod(table, {**POD, "HOSTNAME": "gpt2-worker-1", name: value})
    if value == "172.16.0.9":
        assert server is None
        return
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

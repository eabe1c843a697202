"""Variables and commands of ranks, read back by a shell; interfaces, against what the ip command says."""

import ipaddress
import json
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common.cluster.environment import Process, find_process
from common.cluster.places import Placement, RankPlacement, find_places, place_hosts
from common.cluster.rank_environment import (
    hccl_seconds,
    make_rendezvous,
    network_of,
    parse_master,
    rank_variables,
    scheduler_variables,
    shell_text,
)
from common.errors import ConfigError
from common.launcher.jobs import make_children
from common.processes import addresses as own_addresses
from common.processes.addresses import interface_of, is_own


def variables(
    places: Placement, number: int, *, backend: str = "torch", table: Path | None = None, **environ: str
) -> dict[str, str]:
    meeting = make_rendezvous(places, port=None, table=table, backend=backend, environ=environ)
    return rank_variables(places.own[number], places, meeting, cores=3, environ=environ)


def test_both_frameworks_are_told_the_same() -> None:
    """A rank finds itself by these variables, and those of the user stay."""
    found = variables(find_places(range(4, 6)), 1, table=Path("/tables/t.json"), MASTER_PORT="4000")
    expected = (
        "RANK_ID=1 DEVICE_ID=5 RANK_SIZE=2 RANK_TABLE_FILE=/tables/t.json RANK=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
        " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=4000 HCCL_CONNECT_TIMEOUT=1800 OMP_NUM_THREADS=3"
        " TORCHINDUCTOR_COMPILE_THREADS=3 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME==lo"
    )
    assert [f"{name}={value}" for name, value in found.items()] == expected.split()
    process = find_process({**found, "RANK_TABLE_FILE": "", "GPT2_LAUNCHER_PID": "1"})
    own = Process(rank=1, world_size=2, local_rank=1, local_world_size=2, device_id=5)
    assert process == replace(own, master="127.0.0.1", port=4000, launcher="launch")
    given = {"HCCL_CONNECT_TIMEOUT": "60", "OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth7"}
    assert variables(find_places(range(2)), 0, **given).items() >= given.items()


def test_a_free_port_on_one_host_and_a_known_one_on_several() -> None:
    first, second = (int(variables(find_places(range(2)), 0)["MASTER_PORT"]) for _ in range(2))
    with socket.socket() as free:
        free.bind(("127.0.0.1", second))
    assert first > 61439  # a connection of another program would take a lower one meanwhile
    several = find_places(range(2), master="127.0.0.1", nodes=2, node_rank=0)
    assert variables(several, 0, MASTER_PORT="4000")["MASTER_PORT"] == "4000"
    found = variables(find_places(range(2), master="127.0.0.1", nodes=2, node_rank=1), 0)
    assert network(found) == ("127.0.0.1", "lo", "=lo")
    assert [found[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")] == ["2", "0", "127.0.0.1"]
    assert found["MASTER_PORT"] == "29500"


def test_mindspore_without_a_table_meets_through_a_scheduler() -> None:
    places = find_places(range(2))
    found = variables(places, 1, backend="mindspore", MASTER_PORT="4000")
    ours = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "4000"}
    assert found.items() >= {**ours, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": "1"}.items()
    meeting = make_rendezvous(places, port=4000, table=None, backend="mindspore", environ={})
    assert scheduler_variables(places, meeting).items() >= {**ours, "MS_ROLE": "MS_SCHED"}.items()
    for node, expected in enumerate((["0", "1", "_scheduler"], ["2", "3"])):
        own = find_places(range(2), master="127.0.0.1", nodes=2, node_rank=node)
        children = make_children(own, meeting, ("a",), environ={})
        assert [child.log_folder.removeprefix("mf_parallel") for child in children] == expected
    for alone in (
        variables(find_places(range(1)), 0, backend="mindspore"),
        variables(places, 0, backend="mindspore", table=Path("/t")),
    ):
        assert not any(name.startswith("MS_") for name in alone)


def network(found: dict[str, str]) -> tuple[str | None, ...]:
    names = ("HCCL_IF_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return tuple(map(found.get, names))


@pytest.mark.parametrize(
    ("addresses", "routes"),
    [
        ({"nodea": ["127.0.1.1"]}, {"192.0.2.1": "10.0.0.7"}),
        ({"nodea": ["127.0.1.1"], "nodeb": ["10.0.0.8"]}, {"10.0.0.8": "10.0.0.7"}),
        ({"nodea": ["127.0.1.1", "10.0.0.7"]}, {}),
        # the way to the others is the host's own loopback address
        ({"nodea": ["127.0.1.1"], "nodeb": ["127.0.1.2"]}, {"127.0.1.2": "127.0.0.1"}),
    ],
)
def test_a_name_of_its_own_that_stands_for_loopback_is_not_told_to_the_others(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]], routes: dict[str, str]
) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for the name of the machine."""
    held = (("127.0.0.1", "lo"), ("127.0.1.1", "lo"), ("10.0.0.7", "eth0"))
    interfaces = [(ipaddress.ip_address(address), name) for address, name in held]
    known = addresses | {address: [address] for address, _ in (*held, ("10.0.0.8", ""))}
    monkeypatch.setattr(own_addresses, "_addresses", lambda host: known.get(host, []))
    monkeypatch.setattr(own_addresses, "_interfaces", lambda: interfaces)
    monkeypatch.setattr(own_addresses, "_route_to", routes.get)
    hosts = ("nodea", "nodeb") if "nodeb" in addresses else ("nodea", "node 1")
    places = tuple(RankPlacement(rank=rank, device_id=0, local_rank=0, host=host) for rank, host in enumerate(hosts))
    found = variables(place_hosts(places, "nodea"), 0)
    assert network(found) == ("10.0.0.7", "eth0", "=eth0")
    assert found["MASTER_ADDR"] == "nodea"


@pytest.mark.skipif(shutil.which("ip") is None, reason="the ip command, to compare with, is absent")
def test_interfaces_are_those_of_the_ip_command() -> None:
    for link in json.loads(subprocess.run(["ip", "-json", "address"], capture_output=True, check=True).stdout):
        for address in link.get("addr_info", []):
            assert interface_of(address["local"]) == link["ifname"], address
    assert interface_of("192.0.2.254") is None and not is_own("192.0.2.254")
    assert is_own("localhost")


def test_the_shell_text_is_what_a_shell_reads_back() -> None:
    words = ['predict.prompt=it\'s a "test"; $HOME `ls` \\n * [0,8]', "a b", "", "new\nline", "小"]
    show = "import json, os, sys; print(json.dumps([os.environ['NAME'], *sys.argv[1:]]))"
    text = shell_text({"NAME": words[0]}, [sys.executable, "-c", show, *words])
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [words[0], *words]


def test_master() -> None:
    assert parse_master("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert parse_master("[fd00::1]:29500") == ("fd00::1", 29500)
    assert parse_master(None) == (None, None)
    for text in ("10.0.0.1", ":29500", "10.0.0.1:", "10.0.0.1:65535", "10.0.0.1:0", "10.0.0.1:x"):
        with pytest.raises(ConfigError, match=r"expected IP:PORT|is not a usable port"):
            parse_master(text)
    with pytest.raises(ConfigError, match="environment: MASTER_PORT: 'x' is not a usable port"):
        variables(find_places(range(2)), 0, MASTER_PORT="x")


def test_hccl_waits_in_multiples_of_68() -> None:
    """No less than the limit, unless that is more than a first Ascend can."""
    assert [hccl_seconds(limit) for limit in (3630, 68, 77.0, 17341)] == ["3672", "68", "136", "17340"]


def test_gloo_takes_the_way_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert network_of(Process(rank=1, world_size=4, local_rank=1, local_world_size=4)) == alone
    several = Process(rank=1, world_size=4, local_rank=1, local_world_size=2, master="127.0.0.2")
    assert network_of(several) == {"GLOO_SOCKET_IFNAME": "lo"}
    # rank 0's host, whose own name is a loopback address in its /etc/hosts
    known = {"node0": ["127.0.1.1"], "10.0.0.7": ["10.0.0.7"]}
    monkeypatch.setattr(own_addresses, "_addresses", lambda host: known.get(host, []))
    monkeypatch.setattr(own_addresses, "_default_address", lambda: "10.0.0.7")
    monkeypatch.setattr(own_addresses, "_interfaces", lambda: [(ipaddress.ip_address("10.0.0.7"), "eth3")])
    assert network_of(replace(several, master="node0")) == {"GLOO_SOCKET_IFNAME": "eth3"}

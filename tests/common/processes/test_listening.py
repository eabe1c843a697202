"""Addresses that the sockets of a run listen on."""

import ipaddress
from dataclasses import replace

import pytest

from common.cluster.environment import Process
from common.cluster.rank_environment import network_of
from common.processes import addresses
from common.processes.addresses import listen


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_only_a_loopback_address_is_listened_at(address: str) -> None:
    with listen(address, 0) as one:
        own, port = one.getsockname()
        assert own == address and port > 0
        with pytest.raises(OSError, match="in use"):
            listen(address, port)


def test_gloo_takes_the_way_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert network_of(Process(rank=1, world_size=4, local_rank=1, local_world_size=4)) == alone
    several = Process(rank=1, world_size=4, local_rank=1, local_world_size=2, master="127.0.0.2")
    assert network_of(several) == {"GLOO_SOCKET_IFNAME": "lo"}
    # rank 0's host, whose own name is a loopback address in its /etc/hosts
    known = {"node0": ["127.0.1.1"], "10.0.0.7": ["10.0.0.7"]}
    monkeypatch.setattr(addresses, "_addresses", lambda host: known.get(host, []))
    monkeypatch.setattr(addresses, "_default_address", lambda: "10.0.0.7")
    monkeypatch.setattr(
        addresses, "_interfaces", lambda: [(ipaddress.ip_address("10.0.0.7"), "eth3")]
    )
    assert network_of(replace(several, master="node0")) == {"GLOO_SOCKET_IFNAME": "eth3"}

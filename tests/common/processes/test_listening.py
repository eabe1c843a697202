"""Addresses that the sockets of a run listen on."""

import pytest

from common.cluster.environment import Process
from common.cluster.rank_environment import network_of_one_host
from common.processes.addresses import listen


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_only_a_loopback_address_is_listened_at(address: str) -> None:
    with listen(address, 0) as one:
        own, port = one.getsockname()
        assert own == address and port > 0
        with pytest.raises(OSError, match="in use"):
            listen(address, port)


def test_gloo_and_nccl_keep_to_one_host() -> None:
    alone = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert (
        network_of_one_host(Process(rank=1, world_size=4, local_rank=1, local_world_size=4))
        == alone
    )
    assert (
        network_of_one_host(Process(rank=1, world_size=4, local_rank=1, local_world_size=2)) == {}
    )

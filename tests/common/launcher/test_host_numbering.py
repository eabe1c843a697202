"""Hosts that nobody has numbered agree on their numbers, and those that do not belong are told
why. The hosts are threads of this process, nodes of one machine with devices of their own.
"""

import queue
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from common.errors import ConfigError
from common.launcher.host_channel import Host, HostChannel, Hosts
from common.launcher.nodes import find_node
from common.processes.channel import connect
from tests.run_scripts import wait_until

LIMIT = 20.0


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def call(port: int, *devices: int, nodes: int = 3, limit: float = LIMIT) -> int:
    return find_node("127.0.0.1", port, nodes, devices, limit)


def start(pool: ThreadPoolExecutor, port: int, *devices: int) -> Future[int]:
    """Start the master and wait until it listens."""
    master = pool.submit(call, port, *devices)

    def listens() -> bool:
        try:
            connect("127.0.0.1", port, 1.0).close()
        except OSError:
            return False
        return True

    wait_until(listens, "the master listens")
    return master


def test_hosts_are_numbered_as_they_come_and_one_may_come_again(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for order in ((2, 4), (4, 2)):
        with ThreadPoolExecutor() as pool:
            master = start(pool, port, 0, 1)
            if order == (4, 2):
                left = HostChannel(hosts(port, 6, 7), queue.SimpleQueue(), restarts=True)
                assert left._join()[2] and left.own == 1
                left.close()
                wait_until(lambda: "has left again" in capsys.readouterr().err, "it has left")
            others = {}
            for first in order:
                others[first] = pool.submit(call, port, first, first + 1)
                time.sleep(0.5)
            assert master.result(LIMIT) == 0
            assert [others[first].result(LIMIT) for first in order] == [1, 2]


def hosts(port: int, *devices: int, own: int = -1) -> Hosts:
    """Return the list of three nodes as ``find_node`` makes it."""
    names, size = ("127.0.0.1", "node 1", "node 2"), len(devices)
    ranks = [tuple(range(node * size, (node + 1) * size)) for node in range(3)]
    return Hosts(
        all=tuple(Host(address=name, ranks=held) for name, held in zip(names, ranks, strict=True)),
        own=own,
        port=port,
        devices=devices,
    )


def test_hosts_that_do_not_belong_are_refused(port: int) -> None:
    """One started twice, or with another number of hosts or devices, or with a number."""
    with ThreadPoolExecutor() as pool:
        master = start(pool, port, 0, 1)
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: call(port, 1, 2), "the run was started twice there"),
            (lambda: call(port, 2, 3, nodes=2), "the same --nnodes"),
            (lambda: call(port, 7), "as many devices"),
            (
                lambda: HostChannel(
                    hosts(port, 2, 3, own=1), queue.SimpleQueue(), restarts=False
                ).gather(0, 9.0, lambda: True),
                "give --node_rank on all hosts or on none",
            ),
        ]
        for start_it, why in wrong:
            with pytest.raises(ConfigError, match=why):
                start_it()
        connect("127.0.0.1", port, 1.0).close()
        others = [pool.submit(call, port, *devices) for devices in ((2, 3), (4, 5))]
        assert master.result(LIMIT) == 0
        assert sorted(other.result(LIMIT) for other in others) == [1, 2]


def test_a_host_that_comes_when_the_run_has_begun_is_told_so(port: int) -> None:
    """It asks for a number, and is refused by the channel of the numbered hosts."""
    numbered = Hosts(all=hosts(port, 0).all, own=0, port=port)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    channel = HostChannel(numbered, events, restarts=True)
    with pytest.raises(ConfigError, match="has all its 3 hosts already"):
        call(port, 5)
    channel.close()

"""Hosts that nobody has numbered agree on their numbers, and those that do not belong are told
why. The hosts are threads of this process, nodes of one machine with devices of their own.
"""

import queue
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from common.errors import ConfigError, RunError
from common.launcher.host_channel import Host, HostChannel, Hosts
from common.launcher.host_numbering import Numbering
from common.processes.channel import connect
from tests.run_scripts import wait_until

LIMIT = 20.0


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def call(port: int, *devices: int, nodes: int = 3, limit: float = LIMIT) -> Numbering:
    return Numbering(master="127.0.0.1", port=port, nodes=nodes, devices=devices, limit=limit)


def listens(port: int) -> bool:
    try:
        connect("127.0.0.1", port, "a test", 1.0).close()
    except OSError:
        return False
    return True


def start(pool: ThreadPoolExecutor, port: int, *devices: int) -> Future[int]:
    """Start the master and wait until it listens."""
    master = pool.submit(call(port, *devices).find_node)
    wait_until(lambda: listens(port), "the master listens")
    return master


def test_hosts_are_numbered_as_they_come(port: int) -> None:
    for order in ((2, 4), (4, 2)):
        with ThreadPoolExecutor() as pool:
            master = start(pool, port, 0, 1)
            others = {}
            for first in order:
                others[first] = pool.submit(call(port, first, first + 1).find_node)
                time.sleep(0.3)
            assert master.result(LIMIT) == 0
            assert [others[first].result(LIMIT) for first in order] == [1, 2]


def test_one_started_twice_or_with_another_number_of_hosts_or_devices_is_refused(
    port: int,
) -> None:
    with ThreadPoolExecutor() as pool:
        master = start(pool, port, 0, 1)
        with pytest.raises(ConfigError, match="the run was started twice there"):
            call(port, 1, 2).find_node()
        with pytest.raises(ConfigError, match="--nnodes is 2, and that of the master 3"):
            call(port, 2, 3, nodes=2).find_node()
        with pytest.raises(ConfigError, match="it has 1 devices, and the master 2"):
            call(port, 7).find_node()
        connect("127.0.0.1", port, "a stranger", 1.0).close()
        others = [pool.submit(call(port, *devices).find_node) for devices in ((2, 3), (4, 5))]
        assert master.result(LIMIT) == 0
        assert sorted(other.result(LIMIT) for other in others) == [1, 2]


def test_a_host_that_leaves_may_come_again(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor() as pool:
        master = start(pool, port, 0)
        left = connect("127.0.0.1", port, "a launcher", 1.0)
        left.send({"kind": "number", "nodes": 3, "devices": [1]})
        time.sleep(0.2)
        left.close()
        time.sleep(1.2)
        others = [pool.submit(call(port, device).find_node) for device in (1, 2)]
        assert master.result(LIMIT) == 0
        assert sorted(other.result(LIMIT) for other in others) == [1, 2]
    assert "has left again" in capsys.readouterr().err


def test_waiting_has_a_limit_on_both_sides(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        master = pool.submit(call(port, 0, limit=2.0).find_node)
        wait_until(lambda: listens(port), "the master listens")
        other = pool.submit(call(port, 1, limit=1.0).find_node)
        with pytest.raises(RunError, match="not numbered this host within 1 s"):
            other.result(LIMIT)
        with pytest.raises(RunError, match=r"0 of 2 other hosts have come to port .* within 2 s"):
            master.result(LIMIT)
    away = Numbering(master="198.51.100.1", port=port, nodes=2, devices=(0,), limit=1.0)
    with pytest.raises(
        RunError, match=r"host 198\.51\.100\.1 at port .* has not numbered this host"
    ):
        away.find_node()


def test_a_host_that_comes_when_the_run_has_begun_is_told_so(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    hosts = Hosts(
        all=(Host(address="127.0.0.1", ranks=(0,)), Host(address="node 1", ranks=(1,))),
        own=0,
        port=port,
    )
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    channel = HostChannel(hosts, events, restarts=False)
    try:
        with pytest.raises(ConfigError, match="refused this host: has all its 2 hosts already"):
            call(port, 5, nodes=2).find_node()
        wait_until(lambda: "a host that came late was refused" in capfd.readouterr().err, "a note")
    finally:
        threading.Thread(target=channel.close, daemon=True).start()

"""Hosts that nobody has numbered agree on their numbers, and those that do not belong are told
why. The hosts are threads of this process, nodes of one machine with devices of their own.
"""

import queue
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from common.errors import ConfigError, RunError
from common.launcher.control import Control, Host, HostNote, Hosts
from common.launcher.roll_call import RollCall, _Caller, find_node
from common.processes.channel import Channel, connect
from tests.run_scripts import wait_until

LIMIT = 20.0


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def call(port: int, *devices: int, nodes: int = 3, limit: float = LIMIT) -> RollCall:
    return RollCall(master="127.0.0.1", port=port, nodes=nodes, devices=devices, limit=limit)


def listens(port: int) -> bool:
    try:
        connect("127.0.0.1", port, "a test", 1.0).close()
    except OSError:
        return False
    return True


def start(pool: ThreadPoolExecutor, port: int, *devices: int) -> Future[int]:
    """Start the master and wait until it listens."""
    master = pool.submit(find_node, call(port, *devices))
    wait_until(lambda: listens(port), "the master listens")
    return master


def test_numbers_do_not_depend_on_the_order_of_arrival(port: int) -> None:
    for order in ((2, 4), (4, 2)):
        with ThreadPoolExecutor() as pool:
            master = start(pool, port, 0, 1)
            others = {}
            for first in order:
                others[first] = pool.submit(find_node, call(port, first, first + 1))
                time.sleep(0.1)
            assert master.result(LIMIT) == 0
            assert {first: node.result(LIMIT) for first, node in others.items()} == {2: 1, 4: 2}


def test_hosts_are_sorted_as_numbers_not_as_text() -> None:
    with socket.socket() as one:
        callers = [
            _Caller(address=address, devices=(0,), link=Channel(one, "a test"))
            for address in ("fe80::1", "10.0.0.10", "10.0.0.9")
        ]
        ordered = sorted(callers, key=lambda caller: caller.order)
    assert [caller.address for caller in ordered] == ["10.0.0.9", "10.0.0.10", "fe80::1"]


def test_one_started_twice_or_with_another_number_of_hosts_or_devices_is_refused(
    port: int,
) -> None:
    with ThreadPoolExecutor() as pool:
        master = start(pool, port, 0, 1)
        with pytest.raises(ConfigError, match="the run was started twice there"):
            find_node(call(port, 1, 2))
        with pytest.raises(ConfigError, match="--nnodes is 2, and that of the master 3"):
            find_node(call(port, 2, 3, nodes=2))
        with pytest.raises(ConfigError, match="it has 1 devices, and the master 2"):
            find_node(call(port, 7))
        connect("127.0.0.1", port, "a stranger", 1.0).close()
        others = [pool.submit(find_node, call(port, *devices)) for devices in ((2, 3), (4, 5))]
        assert [master.result(LIMIT), *(other.result(LIMIT) for other in others)] == [0, 1, 2]


def test_a_host_that_leaves_may_come_again(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor() as pool:
        master = start(pool, port, 0)
        left = connect("127.0.0.1", port, "a launcher", 1.0)
        left.send({"kind": "roll call", "nodes": 3, "devices": [1]})
        time.sleep(0.2)
        left.close()
        time.sleep(1.2)
        others = [pool.submit(find_node, call(port, device)) for device in (1, 2)]
        assert [master.result(LIMIT), *(other.result(LIMIT) for other in others)] == [0, 1, 2]
    assert "has left again" in capsys.readouterr().err


def test_waiting_has_a_limit_on_both_sides(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        master = pool.submit(find_node, call(port, 0, limit=2.0))
        wait_until(lambda: listens(port), "the master listens")
        other = pool.submit(find_node, call(port, 1, limit=1.0))
        with pytest.raises(RunError, match="not numbered this host within 1 s"):
            other.result(LIMIT)
        with pytest.raises(RunError, match=r"0 of 2 other hosts have come to port .* within 2 s"):
            master.result(LIMIT)
    away = RollCall(master="198.51.100.1", port=port, nodes=2, devices=(0,), limit=1.0)
    with pytest.raises(
        RunError, match=r"host 198\.51\.100\.1 at port .* has not numbered this host"
    ):
        find_node(away)


def test_a_host_that_comes_when_the_run_has_begun_is_told_so(port: int) -> None:
    hosts = Hosts(
        all=(Host(address="127.0.0.1", ranks=(0,)), Host(address="node 1", ranks=(1,))),
        own=0,
        port=port,
    )
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    control = Control(hosts, events, 30.0)
    control.start()
    try:
        with pytest.raises(ConfigError, match="refused this host: has all its 2 hosts already"):
            find_node(call(port, 5, nodes=2))
        note = events.get(timeout=LIMIT)
        assert isinstance(note, HostNote) and "a host that came late was refused" in note.text
    finally:
        threading.Thread(target=control.close, daemon=True).start()

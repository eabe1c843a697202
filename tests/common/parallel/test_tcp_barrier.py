"""Ranks that wait for each other, as threads over the loopback interface."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import RunError
from common.parallel.tcp_barrier import BarrierServer, TcpBarrier, connect


def barriers(size: int) -> list[TcpBarrier]:
    host = BarrierServer("127.0.0.1")
    with ThreadPoolExecutor(size) as pool:
        first = pool.submit(host.receive, size)
        others = [
            pool.submit(connect, rank, "127.0.0.1", host.port, host.token)
            for rank in range(1, size)
        ]
        return [first.result(timeout=20), *(other.result(timeout=20) for other in others)]


@pytest.mark.parametrize(
    ("address", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("10.0.0.1", "::")],
)
def test_other_hosts_cannot_call_a_run_of_one_host(address: str, bound: str) -> None:
    host = BarrierServer(address)
    with host._listener as listener:
        # a container may have no IPv6
        assert listener.getsockname()[0] in (bound, "0.0.0.0" if bound == "::" else bound)


@pytest.mark.parametrize("late", [0, 2])
def test_nobody_continues_before_the_last_has_come(late: int) -> None:
    everyone, gone_on, may_come = barriers(3), [], threading.Event()

    def wait(rank: int) -> None:
        for number in range(3):
            if rank == late and number == 1:
                may_come.wait(20)
            everyone[rank].wait()
            gone_on.append((number, rank))

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(wait, rank) for rank in range(3)]
        while len(gone_on) < 3:
            time.sleep(0.01)
        time.sleep(0.2)
        assert sorted(gone_on) == [(0, 0), (0, 1), (0, 2)]
        may_come.set()
        for each in waiting:
            each.result(timeout=20)
    assert [number for number, _ in gone_on] == [0] * 3 + [1] * 3 + [2] * 3


def test_one_that_has_gone_is_named() -> None:
    everyone = barriers(3)
    everyone[2]._peers[0].close()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(everyone[1].wait)
        with pytest.raises(RunError, match="rank 0: rank 2 has left the run"):
            everyone[0].wait()
        for peer in everyone[0]._peers.values():  # what the end of its process does
            peer.close()
        with pytest.raises(RunError, match="rank 1: rank 0 has left the run"):
            other.result(timeout=20)


def test_a_wait_has_an_end() -> None:
    everyone = barriers(2)
    everyone[0].limit(0.2)
    with pytest.raises(
        RunError,
        match=r"rank 0: no word from rank 1 for 0 s; see its log, or raise runtime.stall_limit",
    ):
        everyone[0].wait()


def test_strangers_are_turned_away() -> None:
    host = BarrierServer("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(host.receive, 2)
        with socket.create_connection(("127.0.0.1", host.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\nxx")
            assert stranger.recv(1) == b""
        connect(1, "127.0.0.1", host.port, host.token)
        assert set(first.result(timeout=20)._peers) == {1}


def test_a_port_that_nobody_holds_is_one_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        RunError, match=rf"rank 1: port {port} of 127.0.0.1, the host of rank 0, cannot be reached"
    ):
        connect(1, "127.0.0.1", port, "0" * 32)

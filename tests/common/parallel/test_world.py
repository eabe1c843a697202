"""Ranks that wait for each other, as threads over the loopback interface; one that waits for the
others to come: what it says, when it gives up, and what it refuses at once. How ranks agree.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest

from common.cluster.environment import Process
from common.errors import ConfigError, DataError, GPT2Error, RunError, StopRequested, StorageError
from common.log import LOG
from common.parallel import world as module
from common.parallel.topology import Topology
from common.parallel.world import Arrival, BarrierServer, TcpBarrier, WorldBase, connect, exit_barrier
from common.processes.addresses import free_port, listen


def barriers(size: int) -> list[TcpBarrier]:
    host = BarrierServer("127.0.0.1")
    with ThreadPoolExecutor(size) as pool:
        first = pool.submit(host.receive, size)
        others = [pool.submit(connect, rank, "127.0.0.1", host.port, host.token) for rank in range(1, size)]
        return [first.result(timeout=20), *(other.result(timeout=20) for other in others)]


def test_other_hosts_cannot_call_a_run_of_one_host() -> None:
    # a container may have no IPv6
    for address, bound in (("127.0.0.2", {"127.0.0.2"}), ("10.0.0.1", {"::", "0.0.0.0"})):
        host = BarrierServer(address)
        with host._listener as listener:
            assert listener.getsockname()[0] in bound


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
    everyone[2].peers[0].close()
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(everyone[1].wait)
        with pytest.raises(RunError, match="rank 0: rank 2 has left the run"):
            everyone[0].wait()
        for peer in everyone[0].peers.values():  # what the end of its process does
            peer.close()
        with pytest.raises(RunError, match="rank 1: rank 0 has left the run"):
            other.result(timeout=20)


def test_a_connection_that_the_kernel_gives_up_is_one_line() -> None:
    peer = Mock(**{"recv.side_effect": TimeoutError(errno.ETIMEDOUT, "Connection timed out")})
    with pytest.raises(RunError, match="rank 0: rank 1 has left the run"):
        TcpBarrier(0, {1: peer}).wait()


def test_strangers_are_turned_away_and_a_wait_has_an_end() -> None:
    host = BarrierServer("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(host.receive, 2)
        with socket.create_connection(("127.0.0.1", host.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n")
            assert stranger.recv(1) == b""
        others = {1: connect(1, "127.0.0.1", host.port, host.token)}
        found = first.result(timeout=20)
    assert set(found.peers) == set(others)
    found.limit = 0.2
    with pytest.raises(RunError, match=r"rank 0: no word from rank 1 for 0 s; see its log, or raise runtime"):
        found.wait()
    port = free_port()
    with pytest.raises(RunError, match=rf"rank 1: port {port} of 127.0.0.1, the host of rank 0, cannot be reached"):
        connect(1, "127.0.0.1", port, "0" * 32)


# ---- arrival ----


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes are tenths of a second."""
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def arrival(rank: int, address: str, port: int, limit: float = 30.0) -> Arrival:
    return Arrival(Process(rank=rank, world_size=2), "MASTER_ADDR", address, port, limit)


def test_it_says_where_it_waits_and_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, until something answers there or the limit has passed."""
    port, said = free_port(), []
    place = f"127.0.0.1:{port}"
    gives_up = rf"rank 1 of 2 has waited 0.2 s \(runtime.stall_limit\) at {place} for rank"
    with pytest.raises(RunError, match=gives_up):
        arrival(1, "127.0.0.1", port, limit=0.2).reach("rank 0")
    with ExitStack() as listeners:

        def come_late(text: str) -> None:
            said.append(text)
            if len(said) == 3:
                listeners.enter_context(listen("127.0.0.1", port))

        monkeypatch.setattr(LOG, "warning", come_late)
        arrival(1, "127.0.0.1", port).reach("rank 0")
    waits = f"rank 1 of 2 waits at {place} for rank 0, which does not answer (Connection refused);"
    assert said[:3] == [f"{waits} 0 s"] * 3


@pytest.mark.parametrize("address", ["no-such-host.invalid", "10.0.0.1:29500"])
def test_a_name_that_does_not_resolve_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        waits = arrival(rank, address, 29500)
        with pytest.raises(ConfigError, match=f"MASTER_ADDR={address} is not an address"):
            waits.reach("rank 0") if rank else waits.require_here()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")  # its name comes with the pod
    with pytest.raises(RunError, match="rank 0, which does not answer"):
        arrival(1, address, 29500, limit=0.2).reach("rank 0")


def test_rank_0_refuses_the_address_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    arrival(0, "localhost", 1).require_here()
    # an address that is not this host's
    monkeypatch.setattr(module, "is_here", lambda address: False)
    with listen("127.0.0.1", 0) as listener:  # the forwarded port of a container
        port = listener.getsockname()[1]
        arrival(0, "127.0.0.1", port).require_here()
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=127.0.0.1 is not an address of this"):
        arrival(0, "127.0.0.1", port).require_here()


# ---- agreement, with values gathered from a list ----


@dataclass(frozen=True, kw_only=True)
class Told(WorldBase):
    """A rank that is told what all ranks have given."""

    answer: Callable[[Any], list[Any]] = lambda own: [own]

    def gather(self, value: Any) -> list[Any]:
        return self.answer(value)


def test_numbers_of_all_ranks() -> None:
    world = Told(size=3, answer=lambda own: [own, (1e16, 1.0), (-1e16, 1.0)])
    assert world.sum(1.0, 2.0) == [1.0, 4.0], "no digit is lost"
    assert Told(size=3, answer=lambda own: [own, 15, 0]).all_reduce_max(9) == 15
    assert Told().sum(0.5) == [0.5] and Told().all_reduce_max(3) == 3


def test_decisions_and_errors_of_rank_0_hold_everywhere() -> None:
    given: list[Any] = []

    def answer(own: Any) -> list[Any]:
        given.append(own)
        return [own, [None, None]]

    first = Told(rank=0, size=2, answer=answer)
    assert first.decide_on_rank_0(lambda: "resume") == "resume"

    def fails() -> str:
        raise DataError("no data")

    with pytest.raises(DataError, match="no data"):
        first.decide_on_rank_0(fails)
    for answer, expected in zip(given, ("resume", None), strict=True):
        other = Told(rank=1, size=2, answer=lambda own, answer=answer: [answer, own])
        with nullcontext() if expected else pytest.raises(DataError, match="no data"):
            assert other.decide_on_rank_0(lambda: pytest.fail("rank 1 decides nothing")) == expected


def test_the_first_fact_that_differs_is_named() -> None:
    facts = {"seed": 1, "rate": float("nan")}
    Told(size=2, answer=lambda own: [own, dict(own)]).require_equal(facts)
    world = Told(
        size=4,
        topology=Topology(data=2, tensor=2),
        answer=lambda own: [own, {**own, "seed": 2}, own, {**own, "seed": 2}],
    )
    with pytest.raises(ConfigError, match="rank 1 differs from rank 0 in seed: 2 and 1"):
        world.require_equal(facts)
    assert world.replicas == {0: 0, 1: 1, 2: 0, 3: 1}
    world.require_equal(facts, world.replicas)


@pytest.mark.parametrize("error", [None, StopRequested(15, "stopped"), StorageError("disk full")])
def test_nobody_leaves_before_the_others_but_with_an_error_of_its_own(error: GPT2Error | None) -> None:
    """Errors that all ranks meet at one step. A launcher would kill rank 0 in its save when
    another had left.
    """
    met: list[str] = []
    with pytest.raises(type(error)) if error else nullcontext(), exit_barrier(lambda: met.append("barrier")):
        if error:
            raise error
    assert met == ["barrier"] * (not isinstance(error, StorageError))

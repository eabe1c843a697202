"""The doctors of two hosts, one of them played by the test where it must misbehave."""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from common.cluster.places import Placement, RankPlacement
from common.doctor import peer_channel as hosts
from common.doctor.allreduce import TrialRank
from common.doctor.peer_channel import FirstHost, OtherHost
from common.doctor.report import State, ok
from common.errors import RunError
from common.processes.addresses import free_port
from common.processes.channel import Channel

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

JOB = {"ranks": 4, "backend": "torch"}
FACTS = {"python": "3.11.9", "torch": "2.13.0"}
PLACES = Placement(
    all=tuple(
        RankPlacement(
            rank=rank,
            device_id=rank % 2,
            local_rank=rank % 2,
            host=("127.0.0.1", "node 1")[rank // 2],
        )
        for rank in range(4)
    ),
    own_host="127.0.0.1",
    master="127.0.0.1",
)


@pytest.fixture
def first() -> Iterator[FirstHost]:
    with FirstHost("127.0.0.1", free_port(), PLACES, JOB, FACTS) as host:
        yield host


def port_of(first: FirstHost) -> int:
    return int(first._server.getsockname()[1])


def play(first: FirstHost, hello: dict[str, Any], clock: float = 0.0) -> threading.Thread:
    """A host with a clock of its own, which says ``hello`` and tells its time until it hears
    something else.
    """
    port = port_of(first)

    def act() -> None:  # the first host may have left by then
        address = ("127.0.0.1", port)
        with (
            suppress(ConnectionError),
            socket.create_connection(address) as connection,
            connection.makefile("rw") as file,
        ):
            file.write(json.dumps(hello) + "\n")
            file.flush()
            for line in file:
                if "ping" not in line:
                    break
                file.write(json.dumps({"time": time.time() + clock}) + "\n")
                file.flush()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_two_doctors_from_the_call_to_the_verdict(first: FirstHost) -> None:
    verdict = []

    def other() -> None:
        with OtherHost("127.0.0.1", port_of(first), 1, JOB, FACTS, 10) as host:
            assert host.wait_for_begin(10) is None
            while (
                told := host.tell(
                    [
                        TrialRank(rank=2, stage="reduced"),
                        TrialRank(rank=3, stage="imported", log=("a line",)),
                    ]
                )
            ) is None:
                time.sleep(0.02)
            verdict.extend(told)

    thread = threading.Thread(target=other)
    thread.start()
    checks = first.gather(10)
    assert [(check.name, check.state) for check in checks] == [
        ("clock", State.OK),
        ("hosts", State.OK),
    ]
    first.begin()
    deadline = time.monotonic() + 10
    while len(first.states()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert first.states()[1] == TrialRank(rank=3, stage="imported", log=("a line",))
    assert first.lost() == []
    first.conclude([ok("all-reduce", "fine")])
    thread.join(10)
    assert verdict == [ok("all-reduce", "fine")]


@pytest.mark.parametrize(
    ("clock", "words"), [(5.0, "is 5.0 s ahead"), (-120.0, "is 120.0 s behind")]
)
def test_a_clock_that_is_wrong(first: FirstHost, clock: float, words: str) -> None:
    play(first, {"host": 1, "job": JOB, "facts": FACTS}, clock)
    check = first.gather(10)[0]
    assert check.state is State.WARNING
    assert check.found == f"node 1 at 127.0.0.1 (ranks 2-3) {words}"


def test_other_versions_are_named(first: FirstHost) -> None:
    play(first, {"host": 1, "job": JOB, "facts": {**FACTS, "torch": "2.12.1"}})
    check = first.gather(10)[0]
    assert (check.name, check.state) == ("versions", State.WARNING)
    assert check.found == "node 1 at 127.0.0.1 (ranks 2-3) has torch 2.12.1 (here 2.13.0)"


def test_other_arguments_are_refused_on_both_sides(first: FirstHost) -> None:
    refused = []

    def other() -> None:
        with OtherHost(
            "127.0.0.1", port_of(first), 1, {**JOB, "backend": "mindspore"}, FACTS, 10
        ) as host:
            refused.extend(host.wait_for_begin(10) or [])

    thread = threading.Thread(target=other)
    thread.start()
    checks = first.gather(10)
    thread.join(10)
    assert checks == refused
    assert checks[-1].found == "127.0.0.1 calls itself host 1, with backend mindspore (here torch)"
    assert checks[-1].state is State.ERROR


def test_a_doctor_that_is_started_again_replaces_itself(first: FirstHost) -> None:
    with socket.create_connection(("127.0.0.1", port_of(first))) as ended:
        ended.sendall(json.dumps({"host": 1, "job": JOB, "facts": FACTS}).encode() + b"\n")
    play(first, {"host": 1, "job": JOB, "facts": FACTS})
    found = first.gather(5.0)
    assert [(check.name, check.state) for check in found] == [
        ("clock", State.OK),
        ("hosts", State.OK),
    ], found
    assert found[0].found.endswith("(the furthest: node 1 at 127.0.0.1 (ranks 2-3))")


def test_another_program_is_ignored_and_an_absent_host_named(first: FirstHost) -> None:
    with socket.create_connection(("127.0.0.1", port_of(first))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        (check,) = first.gather(0.5)
    assert check.state is State.ERROR
    assert check.found == "no connection from node 1 (ranks 2-3) within 0.5 s"


def test_a_host_that_leaves_and_one_that_falls_silent(
    first: FirstHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = play(first, {"host": 1, "job": JOB, "facts": FACTS})
    first.gather(10)
    monkeypatch.setattr(hosts, "SILENCE_SECONDS", 0.0)
    first._heard[1] = time.monotonic() - 7.0
    assert first.lost() == ["node 1 at 127.0.0.1 (ranks 2-3) has not been heard from for 7 s"]
    monkeypatch.undo()
    first.begin()
    thread.join(10)
    deadline = time.monotonic() + 10
    while not first.lost() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert first.lost() == ["node 1 at 127.0.0.1 (ranks 2-3) has left"]


def test_nobody_listens_or_somebody_else_does(first: FirstHost) -> None:
    with pytest.raises(
        RunError,
        match=r"host 0 does not answer at 127\.0\.0\.1:\d+ \(MASTER_PORT \+ 1\) within 0\.5 s",
    ):
        OtherHost("127.0.0.1", free_port(), 1, JOB, FACTS, 0.5)
    with pytest.raises(RunError, match="cannot listen on"):
        FirstHost("127.0.0.1", port_of(first), PLACES, JOB, FACTS)


def test_host_0_dies_while_the_others_wait() -> None:
    with FirstHost("127.0.0.1", free_port(), PLACES, JOB, FACTS) as first:
        port = port_of(first)
        leaving = threading.Thread(target=lambda: first.gather(10))
        leaving.start()
        other = OtherHost("127.0.0.1", port, 1, JOB, FACTS, 10)
        threading.Thread(target=lambda: (leaving.join(10), first.__exit__()), daemon=True).start()
        with other, pytest.raises(RunError, match="host 0"):
            other.wait_for_begin(10)


def test_a_line_may_say_nan_and_no_line_is_a_traceback() -> None:
    """A rank on a broken link may find NaN as its sum; nested brackets come from what is not a
    doctor.
    """
    ends = socket.socketpair()
    ours, theirs = (Channel(end, "a doctor") for end in ends)
    try:
        ours.send({"ranks": [{"rank": 1, "log": [], "result": {"found": float("nan")}}]})
        assert math.isnan(theirs.receive(5.0)["ranks"][0]["result"]["found"])
        ends[0].sendall(b"[" * 100_000 + b"\n")
        with pytest.raises(ConnectionError, match="no message of a doctor"):
            theirs.receive(5.0)
    finally:
        ours.close()
        theirs.close()

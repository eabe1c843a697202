"""Objects over a socket, however their bytes come, and what is not an object."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from common.processes.channel import Channel, ChannelEndedError

Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel, and the bare other end of it."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_objects_arrive_whole_and_in_order(ends: Ends) -> None:
    channel, other = ends
    for part in (b'{"a": 1}\n{"b"', b": [2", b"]}\n"):
        other.sendall(part)
    assert [channel.receive(5.0), channel.receive(5.0)] == [{"a": 1}, {"b": [2]}]
    channel.send({"c": "é\n"})
    assert other.recv(100) == b'{"c": "\\u00e9\\n"}\n'


def test_the_end_of_the_other_side_and_its_silence(ends: Ends) -> None:
    channel, other = ends
    with pytest.raises(TimeoutError):
        channel.receive(0.05)
    assert not channel.ended.is_set()
    other.close()
    assert channel.hello() == {}
    assert channel.ended.is_set()


@pytest.mark.parametrize("limit", [0.1, 9.0])
def test_sending_has_a_limit_of_its_own(limit: float, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever limit a thread has that receives meanwhile."""
    monkeypatch.setattr("common.processes.channel._SEND_SECONDS", 1)
    channel, other = Channel(ends[0]._socket), ends[1]

    def receive() -> None:
        with suppress(OSError):
            channel.receive(limit)

    receiver = threading.Thread(target=receive)
    receiver.start()
    time.sleep(0.05)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        channel.send({"much": "x" * 5_000_000})
    assert 0.9 < time.monotonic() - began < 5
    other.close()
    receiver.join(5.0)


def test_a_line_without_an_end_is_not_kept(ends: Ends) -> None:
    channel, other = ends
    sender = threading.Thread(target=lambda: [other.sendall(b"x" * 65536) for _ in range(17)])
    sender.start()
    with pytest.raises(ChannelEndedError, match="its lines have no end"):
        channel.receive(5.0)
    sender.join(5.0)


def test_threads_that_send_at_once_do_not_mix_their_lines(ends: Ends) -> None:
    channel, other = ends
    peer = Channel(other.dup())
    threads = [
        threading.Thread(target=lambda n=n: [channel.send({"n": [n] * 2000}) for _ in range(20)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    received = [peer.receive(10.0)["n"] for _ in range(80)]
    assert sorted(numbers[0] for numbers in received) == sorted([0, 1, 2, 3] * 20)
    assert all(len(set(numbers)) == 1 for numbers in received)
    peer.close()

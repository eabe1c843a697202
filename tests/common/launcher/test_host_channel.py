"""Launchers on two addresses of this machine, as two hosts of one run, tell each other how it
goes.
"""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from common.errors import ConfigError, RunError
from common.launcher import host_channel, supervisor
from common.launcher.host_channel import Host, HostChannel, Hosts, Message
from common.launcher.nodes import find_node
from common.launcher.supervisor import Job, run_attempts
from common.processes.addresses import free_port
from tests.common.launcher.started import (
    BEAT,
    FAILS,
    IGNORE,
    NEVER,
    SAVE_AND_LEAVE,
    SLEEP,
    Started,
    children,
    ended_after,
    log,
    until,
    until_ready,
)

Launch = Callable[..., Started]


@pytest.fixture
def port() -> int:
    return free_port()


def listens(address: str, port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex((address, port)) == 0


def gather(channel: HostChannel, attempt: int, limit: float) -> int | None:
    return channel.gather(attempt, limit, lambda event: True)


def heard(channel: HostChannel, kind: str) -> Mapping[str, Any]:
    """Values of the next message of a kind."""
    while (message := channel.next(30)) is None or message.kind != kind:
        assert message is not None
    return message.values


@pytest.fixture
def launch(tmp_path: Path, port: int) -> Iterator[Launch]:
    """Start a host of a list. connect: seconds that it waits for the others."""
    with ended_after() as started:

        def begin(
            own: int,
            *programs: str,
            connect: int = 30,
            times: Mapping[str, float] = MappingProxyType({}),
            **options: Any,
        ) -> Started:
            more = {"DEVICE_ID": "", "HCCL_CONNECT_TIMEOUT": str(connect)}
            two = hosts(own, port)
            ranks = children(*programs, ranks=two.all[own].ranks, **more)
            times = {"LIFE_SECONDS": 0.5, **times}
            started.append(Started(tmp_path, ranks, hosts=two, times=times, **options))
            return started[-1]

        yield begin


def ranks_left(folder: Path) -> list[str]:
    """Processes whose log is still open."""
    found = subprocess.run(["bash", "-c", "ls -l /proc/[0-9]*/fd 2>/dev/null"], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if f"{folder}/mf_parallel" in line]


def test_hosts_end_well_together(launch: Launch, tmp_path: Path) -> None:
    """The second comes late, and no rank of the first starts before."""
    first = launch(0, "pass", "pass", times={"REMIND_SECONDS": 0.2})
    first.until_said("waiting for host 127.0.0.2 (ranks 2-3): its launcher has not come")
    assert not (tmp_path / "mf_parallel0" / "mindformer.log").read_text()
    second = launch(1, "pass", "pass")
    assert [one.end()[0] for one in (first, second)] == [0, 0]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_host_ends_both_with_its_code_and_blame(launch: Launch, tmp_path: Path, failing: int) -> None:
    now = tmp_path / "now"
    broken = (
        f"import os, time\nwhile not os.path.exists({str(now)!r}): time.sleep(.01)\nprint('why'); raise SystemExit(7)"
    )
    both = [launch(own, SLEEP, broken if own == failing else SLEEP) for own in (0, 1)]
    both[1 - failing].until_said("started ranks")
    now.touch()
    rank = 2 * failing + 1
    for code, output in (one.end() for one in both):
        assert code == 7
        assert f"rank {rank} (host 127.0.0.{failing + 1}) ended with exit code 7" in output
    assert ranks_left(tmp_path) == []


@pytest.mark.parametrize("answers", [True, False])
def test_of_two_failures_at_once_host_0_says_which_counts(
    launch: Launch, port: int, tmp_path: Path, answers: bool
) -> None:
    """Each host has blamed its own rank before it hears of the other. A host 0 that says nothing is not waited for."""
    control = HostChannel(hosts(0, port), restarts=False)
    second = launch(1, "raise SystemExit(9)", SLEEP, times={"_DECISION_SECONDS": 30.0 if answers else 1.0})
    gather(control, 0, 30.0)
    told = heard(control, "failed")
    assert told["code"] == 9
    if answers:
        control.tell("end", code=7, then="so", failure={**told, "text": "rank 0 has failed", "code": 7, "ranks": [0]})
    code, output = second.end()
    control.close()
    assert code == (7 if answers else 9)
    blamed = "rank 0 has failed\nall" if answers else "rank 2 (host 127.0.0.2) ended with exit code 9"
    assert f"error: {blamed}" in output and f"all ranks here were ended; exit code {code}" in output
    assert ranks_left(tmp_path) == []


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_stop_on_one_host_stops_both(launch: Launch, tmp_path: Path, signalled: int) -> None:
    both = [launch(0, SAVE_AND_LEAVE, SAVE_AND_LEAVE), launch(1, SAVE_AND_LEAVE, SAVE_AND_LEAVE)]
    until_ready(tmp_path, range(4))
    both[signalled].process.send_signal(signal.SIGINT)
    ends = [one.end() for one in both]
    assert [code for code, _ in ends] == [130, 130]
    assert all("stopped by Ctrl-C, after" in output for _, output in ends)


def test_a_second_signal_on_one_host_kills_both(launch: Launch, tmp_path: Path) -> None:
    both = [launch(0, IGNORE, IGNORE), launch(1, IGNORE, IGNORE)]
    until_ready(tmp_path, range(4))
    both[1].process.send_signal(signal.SIGTERM)
    both[0].until_said("SIGTERM: the ranks save")
    time.sleep(0.4)  # signals closer than that are taken for one
    both[1].process.send_signal(signal.SIGTERM)
    ends = [one.end() for one in both]
    assert [code for code, _ in ends] == [143, 143]
    assert "killed by a second signal, SIGTERM at host 127.0.0.2 (ranks 2-3)" in ends[0][1]
    assert ranks_left(tmp_path) == []


CLOSED = "closed its connection without saying how it ended"


@pytest.mark.parametrize(
    ("lost", "by", "why"),
    [(0, signal.SIGKILL, CLOSED), (1, signal.SIGKILL, CLOSED), (1, signal.SIGSTOP, "has not been heard from for 2 s")],
)
def test_a_host_that_is_killed_or_silent_is_lost(
    launch: Launch, tmp_path: Path, lost: int, by: signal.Signals, why: str
) -> None:
    times = {"LOST_SECONDS": 2.0} if by == signal.SIGSTOP else {}
    both = [launch(0, SLEEP, SLEEP, times=times), launch(1, SLEEP, SLEEP)]
    until_ready(tmp_path, range(4))
    both[lost].process.send_signal(by)
    code, output = both[1 - lost].end()
    assert code == 1
    assert f"host 127.0.0.{lost + 1} (ranks {'2-3' if lost else '0-1'}) {why}" in output


def test_a_stall_is_blamed_on_the_rank_of_the_other_host(launch: Launch, tmp_path: Path) -> None:
    wait = BEAT + "beat(3, 'computing'); time.sleep(600)"
    stop = BEAT + "beat(3, 'computing'); os.kill(os.getpid(), signal.SIGSTOP)"
    both = [launch(0, wait, wait, stall_limit=5.0), launch(1, stop, wait, stall_limit=5.0)]
    for code, output in (one.end() for one in both):
        assert code == 1
        assert re.search(r"rank 2 \(host 127.0.0.2\) has made no progress .*its process is stopped \(state T\)", output)
        assert not re.search(r"rank [013] .*no progress", output)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (0, r"host 127.0.0.2 \(ranks 2-3\): its launcher has not come to port \d+, which must be open"),
        (1, r"host 127.0.0.1 \(ranks 0-1\): its port \d+, .* be open, cannot be reached \(Connection refused\)"),
    ],
)
def test_a_host_that_does_not_come_is_spoken_of_early(launch: Launch, own: int, why: str) -> None:
    times = {"REMIND_SECONDS": 0.2, "PATIENCE_SECONDS": 0.0}
    code, output = launch(own, "pass", "pass", connect=1, times=times).end()
    assert code == 1
    assert re.search(f"waiting for {why}\n", output)
    assert re.search(f"waited 1 s for {why}; look", output)


def hosts(own: int, port: int, *names: str, size: int = 2, devices: tuple[int, ...] = ()) -> Hosts:
    """Return a list of hosts with ``size`` ranks each, by default two of them."""
    names = names or ("127.0.0.1", "127.0.0.2")
    every = [Host(address=name, ranks=tuple(range(size * n, size * n + size))) for n, name in enumerate(names)]
    return Hosts(all=tuple(every), own=own, port=port, devices=devices)


def test_a_port_in_use_is_one_clear_error(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=rf"port {port}: cannot listen .*Address already in use.*MASTER_PORT"),
    ):
        HostChannel(hosts(0, port), restarts=False)


@pytest.mark.parametrize(("first", "is_open"), [("127.0.0.1", False), ("localhost", True), ("198.51.100.7", True)])
def test_host_0_listens_at_all_its_addresses_unless_a_loopback_address_was_given(
    port: int, first: str, is_open: bool
) -> None:
    """127.0.0.3 stands for another address of this host than that by which the others know it."""
    control = HostChannel(hosts(0, port, first, "b"), restarts=False)
    assert listens("127.0.0.3", port) is is_open
    control.close()


def test_while_file_descriptors_are_short_host_0_says_so_and_does_not_spin(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looks: list[socket.socket] = []

    def accept(server: socket.socket) -> None:
        looks.append(server)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    control = HostChannel(hosts(0, port), restarts=False)
    with socket.create_connection(("127.0.0.1", port)):
        until(lambda: looks)
        time.sleep(0.3)
        control.close()
    assert len(looks) <= 100  # asyncio's backlog, once a second
    said = capfd.readouterr().err
    assert said.count("Too many open files") == 1 and "Traceback" not in said


def test_a_line_without_an_end_is_not_kept(port: int) -> None:
    control = HostChannel(hosts(0, port), restarts=False)
    with socket.create_connection(("127.0.0.1", port)) as caller, pytest.raises(ConnectionError):
        for _ in range(1000):
            caller.sendall(b"x" * 65536)
    control.close()


def test_two_hosts_with_one_number_are_named_and_one_that_comes_back_is_not(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_channel, "REMIND_SECONDS", 0.2)
    opened: list[HostChannel] = []

    def call(own: int) -> HostChannel:
        three = hosts(own, port, "127.0.0.1", "127.0.0.2", "127.0.0.3", size=1)
        opened.append(HostChannel(three, restarts=True))
        return opened[-1]

    control, first = call(0), call(1)
    pool = ThreadPoolExecutor()
    try:
        pool.submit(gather, first, 0, 5.0)
        until(lambda: "waiting for the others; this host has come" in capfd.readouterr().err)
        again = pool.submit(gather, call(1), 0, 5.0)
        until(lambda: "(rank 0): it is not ready for this host yet" in capfd.readouterr().err)
        control._callers[1] = ("192.0.2.1", [])
        same = r"192\.0\.2\.1 and 127\.0\.0\.1 have come with the same number; give each host"
        with pytest.raises(ConfigError, match=same):
            again.result(10.0)
        assert len(re.findall(same, capfd.readouterr().err)) == 1
        opened.remove(first)
        first.put("begin", number=0)
        first.close()  # it has crashed
        until(lambda: 1 not in control._links)
        again = pool.submit(gather, call(1), 0, 5.0)
        third = pool.submit(gather, call(2), 0, 5.0)
        assert [gather(control, 7, 20.0), again.result(20.0), third.result(20.0)] == [7, 7, 7]
    finally:
        for channel in opened:
            channel.put("begin", number=0)  # ends what waits
            channel.close()
        pool.shutdown()


def test_garbage_is_dropped_and_names_are_resolved(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    two = ("localhost", "127.0.0.2")
    first = HostChannel(hosts(0, port, *two), restarts=False)
    hello = {"kind": "hello", "host": 1, "hosts": first._hosts.listed(), "devices": []}
    damages: list[dict[str, Any]] = [{"devices": [[1]]}, {"devices": ["a"]}, {"host": "1"}, {"host": 2}]
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1, 2]\n",
        b"\xff" * 100 + b"\n",
        b"[" * 5000 + b"\n",
        *(json.dumps({**hello, **damage}).encode() + b"\n" for damage in damages),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as caller:
            caller.sendall(garbage)
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(100)[:18] in (b"", b'{"kind": "refused"')
    assert re.fullmatch("(host 127.0.0.1 was refused: .*\n){4}", capfd.readouterr().err)
    second = HostChannel(hosts(1, port, *two), restarts=False)
    with ThreadPoolExecutor() as pool:  # host 0 counts the attempts
        numbers = [pool.submit(gather, channel, 4 + n, 30.0) for n, channel in enumerate((first, second))]
        assert [number.result() for number in numbers] == [4, 4]
    second.tell("stop", signal=15)
    assert first.next(30) == Message(host=1, kind="stop", values={"signal": 15, "where": ""})
    again = HostChannel(hosts(1, port, *two), restarts=False)
    with pytest.raises(ConfigError, match="the run was started twice"):
        gather(again, 0, 30.0)
    again.close()
    second.set_life(done=True, stopped=False)
    assert heard(first, "life")["done"] is True
    second.close()
    first.close()


@pytest.mark.parametrize(
    ("kind", "values"),
    [("failed", {}), ("failed", {"text": "gone", "code": "x"}), ("life", {"states": [[1]]}), ("exit", {"code": 0})],
)
def test_a_damaged_message_loses_its_host(port: int, kind: str, values: dict[str, Any]) -> None:
    first, second = (HostChannel(hosts(own, port), restarts=False) for own in (0, 1))
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda channel: gather(channel, 0, 30.0), (first, second))) == [0, 0]
    second.tell(kind, **values)
    assert heard(first, "lost")["text"] == "host 127.0.0.2 (ranks 2-3) has sent a damaged message"
    assert heard(second, "lost")["text"].startswith("host 127.0.0.1 (ranks 0-1) closed its connection")
    for channel in (second, first):
        channel.close()


@pytest.mark.parametrize("host", [None, "1", [1], 2])
def test_a_damaged_welcome_is_something_else(port: int, host: object) -> None:
    second = HostChannel(hosts(1, port), restarts=False)
    with socket.create_server(("127.0.0.1", port)) as server, ThreadPoolExecutor() as pool:
        called = pool.submit(gather, second, 0, -host_channel.PATIENCE_SECONDS)
        caller, _ = server.accept()
        caller.sendall(json.dumps({"kind": "welcome", "host": host}).encode() + b"\n")
        with caller.makefile("rb") as sent, pytest.raises(RunError, match="something else answers at its port"):
            sent.read()  # until the connection is closed
            called.result(10)
        caller.close()
    second.close()


def test_a_host_that_has_heard_the_begin_calls_nobody_again(port: int) -> None:
    """Its channel was for the numbers only: host 0 has left, and the run listens at the port."""
    opened = [HostChannel(hosts(own, port), restarts=True) for own in (0, 1)]

    def goes_on(event: Message | None) -> bool:
        if event is not None and event.kind == "begin":
            until(lambda: not opened[1].has_first)
            opened.append(HostChannel(hosts(0, port, "127.0.0.1", "b", "c"), restarts=False))
        return True

    with ThreadPoolExecutor() as pool:
        second = pool.submit(opened[1].gather, 0, 20.0, goes_on)
        assert gather(opened[0], 4, 20.0) == 4
        opened[0].close()
        assert second.result(20.0) == 4
    for channel in opened[1:]:
        channel.close()


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_before_a_restart_ends_all_hosts(launch: Launch, tmp_path: Path, signalled: int) -> None:
    """Host 0 is in its pause, and host 1 waits for it to begin. The logs stay as they are."""
    both = [launch(own, [FAILS, SLEEP][own], most=5, pause=60.0) for own in (0, 1)]
    for one in both:
        one.until_said("restart 1 of 5 in 60 s")
    both[signalled].process.send_signal(signal.SIGTERM)
    for own, (code, output) in enumerate(one.end() for one in both):
        where = "" if own == signalled else rf" at host 127.0.0.{signalled + 1} \(ranks .*\)"
        assert code == 143
        assert re.search(rf"stopped by SIGTERM{where}, before the ranks were started", output)
    assert not list(tmp_path.glob("mf_parallel*/mindformer.log.1"))


def test_a_host_0_that_begins_anew_counts_for_all(launch: Launch, tmp_path: Path) -> None:
    """Its launcher dies and is started again. The channel of the other one stays."""
    say = BEAT + "print('ready', os.environ['TORCHELASTIC_RESTART_COUNT']);"
    first = launch(0, say + "time.sleep(600)", most=5)
    program = say + f"\nwhile not os.path.exists({str(tmp_path / 'now')!r}): time.sleep(.01)"
    second = launch(1, program, most=5)
    until_ready(tmp_path, [0, 2])
    first.process.kill()
    second.until_said("restart 1 of 5")
    first = launch(0, say, most=5)
    (tmp_path / "now").touch()
    assert [one.end()[0] for one in (first, second)] == [0, 0]
    for rank in (0, 2):
        assert "ready 0\n" in log(tmp_path, rank)


def test_an_end_that_comes_with_the_begin_is_heard(launch: Launch, port: int) -> None:
    control = HostChannel(hosts(0, port), restarts=False)
    second, failure = launch(1, SLEEP), {"text": "rank 0 has failed", "code": 7, "ranks": [0]}
    gather(control, 0, 30.0)
    control.tell("end", code=7, then="so", failure=failure)
    control.close()
    code, output = second.end()
    assert code == 7 and "rank 0 has failed" in output


@pytest.mark.parametrize("again", [False, True])
def test_what_host_0_says_while_ranks_are_ended_is_heard(
    launch: Launch, port: int, tmp_path: Path, again: bool
) -> None:
    """It has left when host 1 is ready, or begins anew with an attempt of the same number, in which
    the stop of a rank in the one before does not count.
    """
    mark = str(tmp_path / "mark")
    once = f"if not os.path.exists({mark!r}): open({mark!r}, 'w'); sys.exit(143)\n"

    def end(code: int, then: str) -> None:
        failure = {"text": "rank 0 has failed", "code": code, "ranks": [2], "stalled": True}
        control.tell("end", code=code, then=then, failure=failure)

    control = HostChannel(hosts(0, port), restarts=True)
    second = launch(1, SLEEP, "import os, sys\n" + once + SLEEP, most=5)
    gather(control, 0, 30.0)
    until_ready(tmp_path, [2])
    while not heard(control, "life").get("stopped"):
        pass
    end(7, "restarted" if again else "so")  # host 1 waits a second for stacks
    control.close()
    if again:
        control = HostChannel(hosts(0, port), restarts=True)
        gather(control, 0, 30.0)
        until_ready(tmp_path, [3])
        until(lambda: "most recent" not in log(tmp_path, 2) and "ready" in log(tmp_path, 2))
        end(9, "so")
        control.close()
    code, output = second.end()
    assert code == (9 if again else 7)
    assert output.count("\nrestart ") == again and "\nnot restarted: so\n" in output


@pytest.mark.parametrize(("why", "code"), [("", 143), ("not again", 7)])
def test_a_signal_after_host_0_has_decided(
    launch: Launch, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, code: int
) -> None:
    """It ends what would follow, on all hosts, and changes nothing that has been decided."""

    def decide(*_: object) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return why

    monkeypatch.setattr(supervisor, "why_not", decide)
    second = launch(1, SLEEP, most=5)
    job = Job(children=children(FAILS), log_folder=tmp_path, stall_limit=NEVER, hosts=hosts(0, port))
    outcome = run_attempts(lambda number: job, most=5, folder=tmp_path)
    assert (outcome.code, second.end()[0]) == (code, code)


# ---- hosts that nobody has numbered: threads of this process, nodes of one machine ----

LIMIT = 20.0
THREE = ("127.0.0.1", "node 1", "node 2")
"""Names that ``find_node`` gives three hosts."""


def call(port: int, *devices: int, nodes: int = 3, limit: float = LIMIT) -> int:
    return find_node("127.0.0.1", port, nodes, devices, limit)


def start_master(pool: ThreadPoolExecutor, port: int, *devices: int) -> Future[int]:
    """Start the master and wait until it listens."""
    master = pool.submit(call, port, *devices)
    until(lambda: listens("127.0.0.1", port))
    return master


def test_hosts_are_numbered_as_they_come_and_one_may_come_again(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for order in ((2, 4), (4, 2)):
        with ThreadPoolExecutor() as pool:
            master = start_master(pool, port, 0, 1)
            if order == (4, 2):
                sixth = hosts(-1, port, *THREE, devices=(6, 7))
                left = HostChannel(sixth, restarts=True)
                assert left._call()[1] and left.own == 1
                left.close()
                until(lambda: "has left again" in capfd.readouterr().err)
            others = {}
            for first in order:
                others[first] = pool.submit(call, port, first, first + 1)
                time.sleep(0.5)
            assert master.result(LIMIT) == 0
            assert [others[first].result(LIMIT) for first in order] == [1, 2]


def test_hosts_that_do_not_belong_are_refused(port: int) -> None:
    """One started twice, or with another number of hosts or devices, or with a number."""
    with ThreadPoolExecutor() as pool:
        master = start_master(pool, port, 0, 1)
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: call(port, 1, 2), "the run was started twice there"),
            (lambda: call(port, 2, 3, nodes=2), "the same --nnodes"),
            (lambda: call(port, 7), "as many devices"),
            (lambda: gather(HostChannel(hosts(1, port, *THREE), restarts=False), 0, 9.0), "all hosts or on none"),
        ]
        for start_it, why in wrong:
            with pytest.raises(ConfigError, match=why):
                start_it()
        assert listens("127.0.0.1", port)
        others = [pool.submit(call, port, *devices) for devices in ((2, 3), (4, 5))]
        assert master.result(LIMIT) == 0
        assert sorted(other.result(LIMIT) for other in others) == [1, 2]

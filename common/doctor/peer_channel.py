"""Connection of the doctors of several hosts at host 0.

They compare arguments, versions and clocks, and report the states of their ranks. Each host has a
TCP connection to the port after MASTER_PORT, as the launchers do, with one JSON object per line. A
host sends {"host", "job", "facts"}. Host 0 asks {"ping"} for its clock, sends {"begin"}, receives
{"ranks"}, and ends with {"checks"} for all.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from common.cluster.places import Placement
from common.doctor.allreduce import TrialRank
from common.doctor.report import Check, State, error, ok, warning
from common.errors import RunError
from common.processes.channel import Channel, connect
from common.whole_numbers import rank_names

SILENCE_SECONDS = 5.0
"""Seconds of silence after which a host counts as lost; hosts report several times a second."""
CLOCK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_PINGS = 5
_PEER = "a doctor"


class FirstHost:
    """Host 0's side, a context manager. job: must be equal on all hosts; facts: should be equal."""

    def __init__(
        self,
        address: str,
        port: int,
        places: Placement,
        job: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Listen for the others. Raises RunError if the port is taken."""
        self._names = list(places.hosts)
        self._ranks = [[place.rank for place in places.of_host(host)] for host in places.hosts]
        self._job, self._facts = dict(job), dict(facts)
        self._lines: dict[int, Channel] = {}
        self._heard: dict[int, float] = {}
        self._states: dict[int, list[TrialRank]] = {}
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            self._server = socket.create_server((address, port), family=family)
        except OSError as reason:
            raise RunError(
                f"cannot listen on {address}:{port} (MASTER_PORT + 1): {reason.strerror or reason};"
                " check that the address is this host's and the port free, or export"
                " MASTER_PORT=another on"
                " every host"
            ) from None

    def __enter__(self) -> FirstHost:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.close()
        self._server.close()

    def gather(self, limit: float) -> list[Check]:
        """Wait until every host has called, or one with other arguments has, and compare.

        Call ``begin`` only after it.
        """
        deadline = time.monotonic() + limit
        checks: list[Check] = []
        differences: list[tuple[float, str]] = []
        while len(self._lines) < len(self._names) - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                absent = ", ".join(
                    self._name(host)
                    for host in range(1, len(self._names))
                    if host not in self._lines
                )
                remedy = (
                    "start the doctor there too, at about the same time, and check that it can"
                    " reach this host"
                )
                return [
                    *checks,
                    error("hosts", f"no connection from {absent} within {limit:g} s", remedy),
                ]
            self._server.settimeout(left)
            with suppress(OSError):
                connection, (peer, *_) = self._server.accept()
                greeted = self._welcome(Channel(connection, _PEER), str(peer), differences)
                checks += greeted
                if any(check.state is State.ERROR for check in greeted):
                    return checks
        if differences:
            seconds, host = max(differences)
            checks.append(
                ok("clock", f"within {seconds:.3f} s of this host's (the furthest: {host})")
            )
        return [*checks, ok("hosts", f"all {len(self._names)} have called")]

    def begin(self) -> None:
        """Tell the hosts to start their ranks, and receive their states."""
        for host, line in self._lines.items():
            self._heard[host] = time.monotonic()
            with suppress(OSError):
                line.send({"begin": True})
            threading.Thread(target=self._listen, args=(host, line), daemon=True).start()

    def states(self) -> list[TrialRank]:
        """Return the last reported states of the other hosts' ranks."""
        return [state for states in list(self._states.values()) for state in states]

    def lost(self) -> list[str]:
        """Return a sentence for each host that has left or fallen silent."""
        now = time.monotonic()
        found = []
        for host, heard in sorted(self._heard.items()):
            if self._lines[host].ended.is_set():
                found.append(f"{self._name(host)} has left")
            elif now - heard > SILENCE_SECONDS:
                found.append(f"{self._name(host)} has not been heard from for {now - heard:.0f} s")
        return found

    def conclude(self, checks: Sequence[Check]) -> None:
        """Send the result to every host that called."""
        for line in self._lines.values():
            with suppress(OSError):
                line.send({"checks": [asdict(check) for check in checks]})

    def _welcome(
        self, line: Channel, peer: str, differences: list[tuple[float, str]]
    ) -> list[Check]:
        """Check a host that calls, and measure its clock. Other callers are ignored."""
        try:
            hello = line.receive(_ANSWER_SECONDS)
            host, job, facts = int(hello["host"]), dict(hello["job"]), dict(hello["facts"])
        except (OSError, KeyError, TypeError, ValueError, OverflowError):
            line.close()
            return []
        # its doctor was ended, and started again
        if host in self._lines and self._lines[host].is_closed:
            self._lines.pop(host).close()
        if job != self._job or not 0 < host < len(self._names) or host in self._lines:
            found = f"{peer} calls itself host {host}" + (
                f", with {_differences(job, self._job)}" if job != self._job else ""
            )
            refusal = [
                error(
                    "hosts",
                    found,
                    "start the doctor with the same arguments on every host, and --node_rank 0, 1,"
                    " ...",
                )
            ]
            with suppress(OSError):
                line.send({"checks": [asdict(check) for check in refusal]})
            line.close()
            return refusal
        self._lines[host] = line
        if peer not in self._names[host].split(" at "):
            self._names[host] = f"{self._names[host]} at {peer}"
        checks = []
        if facts != self._facts:
            found = f"{self._name(host)} has {_differences(facts, self._facts)}"
            checks.append(warning("versions", found, "install the same on every host"))
        try:
            way, ahead = min(self._exchange_times(line) for _ in range(_PINGS))
        except (OSError, KeyError, TypeError, ValueError):
            # wait for the doctor that replaces it, which may have called already
            if line.is_closed:
                self._lines.pop(host).close()
                return []
            return [
                *checks,
                warning("clock", f"{self._name(host)} did not report its time", "try again"),
            ]
        if abs(ahead) - way / 2 > CLOCK_SECONDS:
            found = f"{self._name(host)} is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
            return [
                *checks,
                warning(
                    "clock",
                    found,
                    "logs and file times of the hosts will not agree: start chronyd or ntpd",
                ),
            ]
        differences.append((abs(ahead), self._name(host)))
        return checks

    @staticmethod
    def _exchange_times(line: Channel) -> tuple[float, float]:
        """Return the seconds of a round trip, and how far the other's clock is ahead.

        The error is at most half the round trip, so the shortest of several counts.
        """
        before, start = time.time(), time.monotonic()
        line.send({"ping": True})
        theirs = float(line.receive(_ANSWER_SECONDS)["time"])
        way = time.monotonic() - start
        return way, theirs - (before + way / 2)

    def _listen(self, host: int, line: Channel) -> None:
        with suppress(OSError, KeyError, TypeError, ValueError):
            while True:
                told = line.receive(None)["ranks"]
                self._states[host] = [_as_state(state) for state in told]
                self._heard[host] = time.monotonic()
        line.ended.set()

    def _name(self, host: int) -> str:
        return f"{self._names[host]} ({rank_names(self._ranks[host])})"


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    keys = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]
    return ", ".join(f"{key} {theirs.get(key)} (here {ours.get(key)})" for key in keys)


def _as_state(told: Mapping[str, Any]) -> TrialRank:
    """Return the state that another host reports of a rank.

    Raises TypeError or ValueError for another structure.
    """
    state = TrialRank(**{**told, "log": tuple(told["log"])})
    numbers = (state.rank, state.ended, 0 if state.code is None else state.code)
    texts = (state.stage, state.state, state.log_path, *state.log)
    if not all(isinstance(value, int | float) for value in numbers) or not all(
        isinstance(value, str) for value in texts
    ):
        raise TypeError("not the state of a rank")
    if state.result is not None:
        _ = [float(state.result.get(key, 0)) for key in ("first", "seconds", "ready", "bytes")]
    return state


class OtherHost:
    """Side of hosts 1, 2, ...; a context manager."""

    def __init__(
        self,
        address: str,
        port: int,
        host: int,
        job: Mapping[str, Any],
        facts: Mapping[str, Any],
        limit: float,
    ) -> None:
        """Call host 0 until it answers. Raises RunError after ``limit`` seconds."""
        self._checks: list[Check] | None = None
        deadline = time.monotonic() + limit
        while True:
            try:
                self._line = connect(
                    address, port, _PEER, max(0.1, min(5.0, deadline - time.monotonic()))
                )
                break
            except OSError as reason:
                if time.monotonic() >= deadline:
                    raise RunError(
                        f"host 0 does not answer at {address}:{port} (MASTER_PORT + 1) within"
                        f" {limit:g} s: {reason.strerror or reason}; start its doctor too, and open"
                        " that port and the one before it"
                    ) from None
                time.sleep(0.2)
        self._line.send({"host": host, "job": dict(job), "facts": dict(facts)})

    def __enter__(self) -> OtherHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def wait_for_begin(self, limit: float) -> list[Check] | None:
        """Answer about the clock until host 0 begins (None) or ends with its checks. Raises
        RunError.
        """
        try:
            while True:
                message = self._line.receive(limit)
                if "ping" in message:
                    self._line.send({"time": time.time()})
                elif "begin" in message:
                    threading.Thread(target=self._listen, daemon=True).start()
                    return None
                elif "checks" in message:
                    return _as_checks(message)
        except OSError as reason:
            raise RunError(
                f"the doctor of host 0 stopped answering while it waited for the others: {reason}"
            ) from None

    def tell(self, states: Sequence[TrialRank]) -> list[Check] | None:
        """Report this host's ranks, and return the checks of host 0 once it has judged.

        Raises RunError if it is gone.
        """
        with suppress(OSError):  # the listening thread also notices the end
            self._line.send({"ranks": [asdict(state) for state in states]})
        if self._line.ended.is_set() and self._checks is None:
            raise RunError(
                "the doctor of host 0 ended before its result; its own report has details"
            )
        return self._checks

    def _listen(self) -> None:
        with suppress(OSError):
            self._checks = _as_checks(self._line.receive(None))
        self._line.ended.set()


def _as_checks(message: Mapping[str, Any]) -> list[Check]:
    """Return the checks of a message. Raises ConnectionError."""
    try:
        return [
            Check(
                name=str(c["name"]),
                state=State(c["state"]),
                found=str(c["found"]),
                remedy=str(c["remedy"]),
            )
            for c in message["checks"]
        ]
    except (KeyError, TypeError, ValueError):
        raise ConnectionError("its message has no valid checks") from None

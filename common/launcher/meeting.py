"""Meeting of the hosts before an attempt, so that no rank starts while a host is missing.

Host 0 waits for the others, chooses those that the attempt runs on, and tells them. Only runs that
may restart meet; other runs start their ranks at once.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from common.errors import RunError
from common.launcher.control import MEETING, Control, HostFailed, HostNote, Hosts, Message
from common.launcher.terminal import tell

_LOOK_SECONDS = 0.5
_PATIENCE = 60.0
"""Seconds that the others wait longer than host 0, which decides."""

Choose = Callable[[Sequence[int]], tuple[int, ...]]
"""Function that returns the hosts to run on, of those that are present; empty if they are too few.
"""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Result of a meeting.

    hosts: indexes of those that run, in the order of their ranks; empty for a spare host when the
    run is over. attempt: number of the attempt, from 0, as host 0 counts.
    """

    hosts: tuple[int, ...]
    attempt: int


def meet(hosts: Hosts, *, attempt: int, limit: float, choose: Choose) -> Meeting:
    """Return the hosts that run the next attempt, once all have come or ``limit`` seconds passed.

    Raises RunError if too few have come by then, and ConfigError if host 0 refuses this one.
    """
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    control = Control(hosts, events, limit + _PATIENCE, phase=MEETING)
    with closing(control):
        control.start()
        if hosts.own == 0:
            chosen = _gather(control, hosts, events, limit, choose)
            control.tell("begin", hosts=list(chosen), attempt=attempt)
            return Meeting(hosts=chosen, attempt=attempt)
        return _wait_for_word(control, hosts, events, limit + _PATIENCE)


def meet_all(hosts: Hosts, *, attempt: int, limit: float) -> int:
    """Return the number of the attempt once all hosts have come.

    Raises RunError if they have not by ``limit`` seconds.
    """

    def all_or_none(present: Sequence[int]) -> tuple[int, ...]:
        return tuple(present) if len(present) == len(hosts.all) else ()

    return meet(hosts, attempt=attempt, limit=limit, choose=all_or_none).attempt


def _gather(
    control: Control,
    hosts: Hosts,
    events: queue.SimpleQueue[Any],
    limit: float,
    choose: Choose,
) -> tuple[int, ...]:
    began = time.monotonic()
    while control.missing() and time.monotonic() - began < limit:
        event = _next(events)
        if isinstance(event, HostNote):
            tell(event.text, error=True)
        elif isinstance(event, Message) and event.kind in ("arrived", "left"):
            verb = "has come" if event.kind == "arrived" else "has left again"
            tell(f"{hosts.all[event.host]} {verb}")
    present = control.present()
    chosen = choose(present)
    if not chosen:
        missing = ", ".join(map(str, control.missing()))
        raise RunError(
            f"{missing or 'no host'} did not come to port {hosts.port} within {limit:g} s,; look"
            " whether the run was started there, and whether this port is open"
        )
    return chosen


def _wait_for_word(
    control: Control, hosts: Hosts, events: queue.SimpleQueue[Any], limit: float
) -> Meeting:
    is_spare = False
    while time.monotonic() - control.heard < limit:
        event = _next(events)
        if isinstance(event, HostNote):
            tell(event.text, error=True)
        elif isinstance(event, HostFailed):
            raise RunError(event.text)
        elif isinstance(event, Message) and event.kind == "begin":
            found = Meeting(
                hosts=tuple(map(int, event.values["hosts"])), attempt=int(event.values["attempt"])
            )
            if hosts.own in found.hosts:
                return found
            is_spare = True
            tell(f"the run continues without {hosts.all[hosts.own]}, which waits as a spare")
    if is_spare:
        tell(f"{hosts.all[0]} answers no more: the run is over, and this spare host ends")
        return Meeting(hosts=(), attempt=0)
    raise RunError(
        f"{hosts.all[0]} has not answered at port {hosts.port} for {limit:g} s; look whether the"
        " run was started there, and at firewalls between the hosts"
    )


def _next(events: queue.SimpleQueue[Any]) -> Any:
    try:
        return events.get(timeout=_LOOK_SECONDS)
    except queue.Empty:
        return None

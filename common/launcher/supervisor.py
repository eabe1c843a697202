"""Supervision of this host's ranks: start them, wait for them, and end all when one fails.

The main thread takes events from one queue: exits, signals and messages of other hosts. It never
waits for a rank, a host or the terminal without a limit.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from common.errors import ConfigError, signal_name
from common.launcher.host_channel import HostChannel, Hosts, Message
from common.launcher.local_ranks import Exit, LocalRanks, stalled_ranks
from common.launcher.process_spec import ProcessSpec
from common.launcher.terminal import Terminal
from common.processes.monitor import RankState
from common.processes.process_tree import in_words
from common.run_folder import RESTART_COUNT
from common.whole_numbers import shortened, whole_number

_TICK_SECONDS = 0.5
_SETTLE_SECONDS = 1.0
"""Seconds to wait, after a failure that may be a consequence, for its cause."""
_SETTLE_SECONDS_OF_HOSTS = 5.0
_TAILS = 2
_SAME_SIGNAL_SECONDS = 0.3
"""Seconds within which a repeated signal counts once: ``timeout`` signals the process and its
group.
"""
_DECISION_SECONDS = 30.0
"""Seconds to wait for host 0's decision: longer than it takes to kill its ranks."""
_CLEAN_EXITS = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job of this host."""

    children: tuple[ProcessSpec, ...]
    log_folder: Path
    """Folder in which mf_parallel{rank}/mindformer.log and env.log are created or appended to."""
    stall_limit: float
    """Seconds without progress after which a rank has failed; math.inf if ranks do not report
    progress.
    """
    follow: bool = False
    """Copy the log of rank 0, or of the lowest rank here, to standard output, with a line of
    progress below it on a terminal.
    """
    steps: int | None = None
    """Steps of the whole run, if known."""
    hosts: Hosts | None = None
    """All hosts; None for one."""
    over_ssh: bool = False
    """Children are launchers on other hosts, so the first to end does not show where the failure
    was.
    """
    return_limit: float = 600.0
    """Seconds to wait before a restart for hosts that have not come back."""
    when_met: Callable[[int], None] | None = None
    """Called with the number of the attempt when the hosts of a run that may restart have met."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of one attempt."""

    code: int
    """Exit code of the launcher."""
    failure: str = ""
    """First line of the failure that counts; empty if there was none."""
    first_step: int = -1
    """First step that a rank of this host worked on; -1 if none."""
    last_step: int = -1
    """Last step that a rank of this host worked on; -1 if none."""
    seconds: float = 0.0
    lost_host: bool = False
    """The failure is that a host was lost or did not come."""
    again: bool = False
    """Another attempt follows on all hosts."""
    number: int = 0
    """Number of the attempt, from 0, as host 0 counts."""
    report: str = ""
    """All lines about the failure, with the last ones of the logs that tell more."""


MayRestart = Callable[[Outcome], bool]
"""Function that tells whether another attempt follows a failure. Host 0 decides for all."""


def run_attempt(job: Job, *, number: int = 0, may_restart: MayRestart | None = None) -> Outcome:
    """Run one attempt, and leave no process behind. Its exit code is equal on all hosts.

    0: all ranks ended well. The code of the rank that failed first, or 128+n if signal n killed it.
    128+n if signal n at a launcher stopped the run. 1: a rank stalled or a host was lost. 2: a host
    runs with another list of hosts.

    may_restart: no rank starts before all hosts have come. Raises ConfigError, with nothing
    started, if a log cannot be written or this host's port is not available, and RunError if not
    all hosts come.
    """
    return _Supervisor(job, number, may_restart).run()


@dataclass(frozen=True, kw_only=True)
class _Signal:
    number: int
    time: float


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Failure of ranks. certain: not the consequence of another failure.

    ranks: those whose logs tell more. stalled: they may still run.
    """

    text: str
    code: int
    certain: bool = True
    ranks: tuple[int, ...] = ()
    stalled: bool = False
    lost_host: bool = False


class _Supervisor:
    def __init__(self, job: Job, number: int, may_restart: MayRestart | None) -> None:
        self._job, self._number, self._may_restart = job, number, may_restart
        self._hosts = job.hosts
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        own = None if job.hosts is None else job.hosts.all[job.hosts.own]
        self._here = "" if own is None else f" at {own}"
        self._ranks = LocalRanks(
            job.children, job.log_folder, None if own is None else own.address, self._events
        )
        limit = connect_limit({**os.environ, **job.children[0].environment})
        self._limit = job.return_limit if may_restart and number else limit
        self._channel = (
            HostChannel(job.hosts, self._events, restarts=may_restart is not None)
            if job.hosts is not None
            else None
        )
        self._terminal = Terminal()
        self._failures: list[_Failure] = []
        self._failed_at = 0.0
        self._stop: _Signal | None = None
        self._elsewhere: dict[int, Mapping[str, Any]] = {}
        """Last life of other hosts."""
        self._end: Mapping[str, Any] | None = None
        """Word of host 0 at the end: exit code, and whether another attempt follows."""
        self._lost_first = False
        """Host 0 cannot be heard any more."""
        self._steps = (-1, -1)
        self._late: list[int] = []
        """Signals after the last look for events."""

    def run(self) -> Outcome:
        began, again = time.monotonic(), False
        with ExitStack() as stack:
            stack.callback(self._terminal.close)
            if self._channel is not None:
                stack.callback(self._channel.close)
                own = self._number
                self._number = self._channel.gather(own, self._limit)
                if self._job.when_met is not None:
                    self._job.when_met(max(own, self._number))  # host 0 may have begun anew
            stack.enter_context(self._signals())
            with self._ranks:
                self._start()
                while not self._is_over():
                    self._take_events()
                    self._look()
                if not self._failures:
                    self._ranks.wait_for_leavers()
                elif self._failure().stalled:
                    self._ranks.show_stacks(self._failure().ranks)
                seconds = time.monotonic() - began
                again = self._decide(seconds)
            again = self._hear_decision(again)
            self._show()
            if self._ranks.undead:
                pids = ", ".join(map(str, self._ranks.undead))
                self._say_error(
                    f"processes {pids} do not end after SIGKILL: they wait for a disk or a driver;"
                    " see dmesg"
                )
            code = self._code()
            report = self._tell_end(code, seconds)
            if late := self._late_signal():
                code, again = 128 + late, False
            return replace(self._outcome(code, seconds), again=again, report=report)

    def _start(self) -> None:
        variables = {} if self._may_restart is None else {RESTART_COUNT: str(self._number)}
        why = self._ranks.start(**variables)
        if why:
            self._fail(_Failure(text=why, code=1))
        self._terminal.say(
            f"started {self._ranks.names()}; logs: {self._ranks.logs()}; to stop and save: Ctrl-C,"
            f" or kill {os.getpid()}"
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT, SIGTERM and SIGHUP into events; those ignored, as under nohup, stay
        ignored.
        """
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._note)
            # if it is ignored, exit codes are lost
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._events.put(_Signal(number=number, time=time.monotonic()))

    # ---- events ----

    def _next_events(self) -> Iterator[Any]:
        """Yield the events that are there, after a wait of at most a tick for the first."""
        try:
            yield self._events.get(timeout=_TICK_SECONDS)
            while True:
                yield self._events.get_nowait()
        except queue.Empty:
            pass

    def _take_events(self) -> None:
        for event in self._next_events():
            if isinstance(event, Exit):
                self._take_exit(event.index, event.code)
            elif isinstance(event, _Signal):
                self._take_signal(event)
            else:
                self._read_message(event)

    def _take_exit(self, index: int, code: int) -> None:
        self._ranks.codes[index] = code
        name = self._ranks.name(index)
        # a signal to the rank itself, after which all ranks stop together
        if self._stop is None and code in _CLEAN_EXITS and code != 0:
            self._stop = _Signal(number=code - 128, time=time.monotonic())
            self._terminal.say(
                f"{name} was stopped by {signal_name(code - 128)}; waiting for the others"
            )
        if code in _CLEAN_EXITS:
            return
        if self._stop is not None and code == -signal.SIGTERM:
            text = (
                f"stopped by {signal_name(self._stop.number)}; {name} ended before it could"
                " save, so the others had to end too"
            )
            self._fail(_Failure(text=text, code=128 + self._stop.number, certain=False))
            return
        text = f"{name} {in_words(code)}; its log: {self._ranks.log(index)}"
        stopped = [state.rank for state in self._ranks.states() if state.is_stopped]
        if stopped:
            text += f"; perhaps because of {self._ranks.names(stopped)}, stopped (state T)"
        # a closed connection to a dead peer also leads to exit code 1 or an abort
        certain = code not in (1, -signal.SIGABRT) and not self._job.over_ssh
        spec = self._ranks.specs[index]
        self._fail(
            _Failure(
                text=text,
                code=code if code > 0 else 128 - code,
                certain=certain,
                ranks=() if spec.name else (spec.rank,),
            )
        )

    def _take_signal(self, event: _Signal) -> None:
        if self._stop is None:
            self._stop_ranks(event)
        elif event.time - self._stop.time > _SAME_SIGNAL_SECONDS:
            text = f"killed by a second signal, {signal_name(event.number)}{self._here}"
            self._fail(_Failure(text=text, code=128 + event.number))

    def _stop_ranks(self, event: _Signal) -> None:
        self._stop = event
        self._ranks.terminate()
        self._terminal.say(
            f"{signal_name(event.number)}: the ranks save at the next step boundary and end; a"
            " second signal kills them"
        )
        if self._channel is not None:
            self._channel.tell("stop", signal=event.number)

    def _read_message(self, event: Message) -> None:
        try:
            self._take_message(event)
        except (KeyError, TypeError, ValueError):
            self._say_error(
                f"host {event.host} sent a message {event.kind!r} that this version cannot read"
            )

    def _take_message(self, event: Message) -> None:
        assert self._hosts is not None
        values = event.values
        if event.kind == "note":
            self._say_error(values["text"])
        elif event.kind == "lost":
            self._lost_first = self._hosts.own > 0
            self._fail(_Failure(text=values["text"], code=1, lost_host=True))
        elif event.kind == "life":
            states = [RankState(**state) for state in values.get("states", ())]
            self._elsewhere[event.host] = {**values, "states": states}
        elif event.kind == "stop" and self._stop is None:
            self._stop_ranks(_Signal(number=int(values["signal"]), time=time.monotonic()))
        elif event.kind == "failed":
            self._fail(_Failure(**{**values, "ranks": tuple(values["ranks"])}))
        elif event.kind == "end":
            self._end = {"code": int(values["code"]), "again": bool(values["again"])}

    def _fail(self, failure: _Failure) -> None:
        """Record a failure and tell the other hosts at once, since the first one told counts as the
        first.
        """
        if failure in self._failures:
            return
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures.append(failure)
        if self._channel is not None:
            self._channel.tell("failed", **asdict(failure))

    # ---- checks between events ----

    def _look(self) -> None:
        self._ranks.read_heartbeats()
        self._steps = self._ranks.steps
        self._show()
        if self._failures:
            return
        states, done = self._ranks.states(), self._ranks.done
        if self._channel is not None and self._hosts is not None and self._hosts.own > 0:
            stopped = any(self._ranks.codes.values())
            self._channel.set_life(
                states=[asdict(state) for state in states], done=done, stopped=stopped
            )
        if self._stop is None:
            self._look_for_stalls(states)
        elif time.monotonic() - self._stop.time > self._job.stall_limit:
            left = tuple(state.rank for state in states)
            text = (
                f"stopped by {signal_name(self._stop.number)};"
                f" {self._ranks.names(left) if left else 'other hosts'} did not end within"
                f" {self._job.stall_limit:g} s (runtime.stall_limit), so all had to"
            )
            self._fail(_Failure(text=text, code=128 + self._stop.number, ranks=left, stalled=True))

    def _look_for_stalls(self, states: list[RankState]) -> None:
        """Look for stalled ranks; host 0 does it for all hosts.

        Each host by itself would blame its ranks for another's stall.
        """
        if self._hosts is not None and self._hosts.own > 0:
            return
        states = [
            *states,
            *(state for life in self._elsewhere.values() for state in life["states"]),
        ]
        if not any(state.idle > self._job.stall_limit for state in states):
            return
        blamed = stalled_ranks(states)
        text = f"stalled for {self._job.stall_limit:g} s (runtime.stall_limit):"
        text = "\n".join([text, *(f"    {state.in_words()}" for state in blamed)])
        ranks = tuple(state.rank for state in blamed)
        self._fail(_Failure(text=text, code=1, ranks=ranks, stalled=True))

    def _show(self) -> None:
        if self._job.follow:
            self._terminal.copy(self._ranks.new_output())
            self._terminal.live(self._ranks.progress(self._job.steps))
        elif self._terminal.has_live_line:
            self._terminal.live(self._ranks.new_output())

    def _say_error(self, text: str) -> None:
        self._terminal.say(text, error=True)

    # ---- end ----

    def _is_over(self) -> bool:
        if self._failures:
            settle = _SETTLE_SECONDS_OF_HOSTS if self._job.over_ssh else _SETTLE_SECONDS
            return (
                any(failure.certain for failure in self._failures)
                or (self._job.over_ssh and self._ranks.done)
                or time.monotonic() - self._failed_at > settle
            )
        if self._hosts is None or not self._ranks.done or self._hosts.own > 0:
            return self._ranks.done and (self._hosts is None or self._end is not None)
        finished = sum(bool(life.get("done")) for life in self._elsewhere.values())
        return finished == len(self._hosts.all) - 1

    def _failure(self) -> _Failure:
        """Return the first failure that is not the consequence of another, if there is one."""
        return next((failure for failure in self._failures if failure.certain), self._failures[0])

    def _code(self) -> int:
        if self._end is not None:
            return int(self._end["code"])
        if self._failures:
            return self._failure().code
        was_stopped = any(self._ranks.codes.values()) or any(
            life.get("stopped") for life in self._elsewhere.values()
        )
        return 128 + self._stop.number if self._stop is not None and was_stopped else 0

    def _outcome(self, code: int, seconds: float) -> Outcome:
        return Outcome(
            code=code,
            failure=self._failure().text.partition("\n")[0] if self._failures else "",
            first_step=self._steps[0],
            last_step=self._steps[1],
            seconds=seconds,
            lost_host=bool(self._failures) and self._failure().lost_host,
            number=self._number,
        )

    def _decide(self, seconds: float) -> bool:
        """Decide on host 0, or on a single host, whether another attempt follows, and tell the end.

        Others without host 0 try again after a failure.
        """
        can_restart = self._may_restart is not None and bool(self._failures) and self._stop is None
        if self._hosts is not None and self._hosts.own > 0:
            return can_restart
        code = self._code()
        again = (
            can_restart
            and self._may_restart is not None
            and self._may_restart(self._outcome(code, seconds))
        )
        if self._channel is not None:
            self._channel.tell("end", code=code, again=again)
        return again

    def _hear_decision(self, again: bool) -> bool:
        """Return host 0's decision, for which others wait; ``again`` without one.

        The ranks have been killed, so their exit codes count no more.
        """
        if self._may_restart is None or self._hosts is None or self._hosts.own == 0:
            return again
        deadline = time.monotonic() + _DECISION_SECONDS
        assert self._channel is not None
        while self._end is None and time.monotonic() < deadline:
            if self._lost_first:
                break
            for event in self._next_events():
                if isinstance(event, _Signal):
                    self._late.append(event.number)
                elif isinstance(event, Message):
                    self._read_message(event)
        return again if self._end is None else bool(self._end["again"])

    def _late_signal(self) -> int:
        """Return the number of the first signal that came after the ranks had failed, or 0."""
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, _Signal):
                    self._late.append(event.number)
        return self._late[0] if self._late and self._failures and self._stop is None else 0

    def _tell_end(self, code: int, seconds: float) -> str:
        """Say how the attempt has ended. Returns what is said of a failure."""
        if not self._job.follow:  # until then the line shows progress; then the result replaces it
            self._terminal.keep_live()
        all_of = "hosts" if self._job.over_ssh else "ranks"
        if not self._failures:
            how = f"stopped by {signal_name(code - 128)}" if code else f"all {all_of} ended well"
            self._terminal.say(f"{how}, after {seconds:.0f} s")
            return ""
        failure = self._failure()
        stopped = self._stop is not None and code == 128 + self._stop.number
        lines, ranks = [f"{'' if stopped else 'error: '}{failure.text}"], failure.ranks
        if self._job.over_ssh:
            lines += [f"also: {other.text}" for other in self._failures if other is not failure]
            ranks = tuple(rank for other in self._failures for rank in other.ranks)
        lines += self._ranks.tails(ranks, None if self._job.over_ssh else _TAILS)
        lines += self._ranks.known_errors()
        where = "" if self._job.over_ssh else " here"
        ended = f"all {all_of}{where} were ended; exit code {code}"
        self._say_error("\n".join([*lines, ended]))
        return "\n".join(lines)


def connect_limit(environ: Mapping[str, str]) -> float:
    """Return the seconds within which all hosts have to connect. Raises ConfigError."""
    text = environ.get("HCCL_CONNECT_TIMEOUT") or "1800"
    seconds = whole_number(text, most_digits=6)
    if not seconds:
        raise ConfigError(
            f"environment: HCCL_CONNECT_TIMEOUT={shortened(text)}: expected whole seconds, 1 to"
            " 999999"
        )
    return float(seconds)

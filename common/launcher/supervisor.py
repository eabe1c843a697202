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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from common.errors import ConfigError, signal_name
from common.launcher.control import (
    Control,
    HostFailed,
    HostMissing,
    HostNote,
    Hosts,
    Message,
)
from common.launcher.local_ranks import Exit, LocalRanks, stalled_ranks
from common.launcher.terminal import Terminal
from common.processes.monitor import RankState
from common.processes.process_tree import in_words
from common.processes.ranks import ProcessSpec
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
_REPORT_SECONDS = 2.0
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
    over_ssh: bool = False
    """Children are launchers on other hosts, so the first to end does not show where the failure
    was.
    """
    may_restart: Callable[[Outcome], bool] | None = None
    """Function that tells whether another attempt follows a failure. Host 0 decides for all."""
    phase: str = ""
    """Number of the attempt in words, by which launchers of one attempt know each other."""


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


def run_attempt(job: Job) -> Outcome:
    """Run one attempt, and leave no process behind. Its exit code is equal on all hosts.

    0: all ranks ended well. The code of the rank that failed first, or 128+n if signal n killed it.
    128+n if signal n at a launcher stopped the run. 1: a rank stalled or a host was lost. 2: a host
    runs with another list of hosts. Raises ConfigError, with nothing started, if a log cannot be
    written or this host's port is not available.
    """
    return _Supervisor(job).run()


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
    def __init__(self, job: Job) -> None:
        self._job = job
        self._hosts = job.hosts
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        own = None if self._hosts is None else self._hosts.all[self._hosts.own]
        self._ranks = LocalRanks(
            job.children, job.log_folder, None if own is None else own.address, self._events
        )
        self._here = "" if own is None else f" at {own}"
        self._control = (
            None
            if self._hosts is None
            else Control(
                self._hosts,
                self._events,
                connect_limit({**os.environ, **job.children[0].environment}),
                phase=job.phase,
            )
        )
        self._terminal = Terminal()
        self._failures: list[_Failure] = []
        self._failed_at = 0.0
        self._stop: _Signal | None = None
        self._told_finished = False
        self._reported = 0.0
        self._elsewhere: dict[int, list[RankState]] = {}
        self._finished: dict[int, bool] = {}
        """Other hosts whose ranks have all ended by themselves -> whether after a signal."""
        self._done_at = 0.0
        """Time at which the ranks here had all ended by themselves."""
        self._end: int | None = None
        self._again: bool | None = None
        """Answer of host 0 to the question whether another attempt follows; None until then."""
        self._lost_first = False
        """Host 0 cannot be heard any more."""
        self._steps = (-1, -1)

    def run(self) -> Outcome:
        began = time.monotonic()
        with ExitStack() as stack:
            stack.callback(self._terminal.close)
            if self._control is not None:
                stack.callback(self._control.close)
                self._control.start()
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
                self._decide(time.monotonic() - began)
            self._wait_for_decision()
            self._show()
            if self._ranks.undead:
                pids = ", ".join(map(str, self._ranks.undead))
                self._terminal.say(
                    f"processes {pids} do not end after SIGKILL: they wait for a disk or a driver;"
                    " see dmesg",
                    error=True,
                )
            code = self._tell_end(time.monotonic() - began)
            return self._outcome(code, time.monotonic() - began)

    def _outcome(self, code: int, seconds: float) -> Outcome:
        return Outcome(
            code=code,
            failure=self._failure().text.partition("\n")[0] if self._failures else "",
            first_step=self._steps[0],
            last_step=self._steps[1],
            seconds=seconds,
            lost_host=bool(self._failures) and self._failure().lost_host,
            again=bool(self._again),
        )

    def _decide(self, seconds: float) -> None:
        """Decide on host 0, or on a single host, whether another attempt follows, and tell it."""
        if self._job.may_restart is None or (self._hosts is not None and self._hosts.own > 0):
            return
        if self._failures:
            outcome = self._outcome(self._failure().code, seconds)
            self._again = self._stop is None and self._job.may_restart(outcome)
        else:
            self._again = False
        if self._control is not None:
            self._control.tell("again", again=self._again)

    def _wait_for_decision(self) -> None:
        """Wait for host 0's decision. Without one, a failure is followed by another attempt."""
        if self._job.may_restart is None or self._again is not None:
            return
        deadline = time.monotonic() + _DECISION_SECONDS
        while self._again is None and time.monotonic() < deadline:
            if self._lost_first or (self._control is not None and self._control.missing()):
                break
            self._take_events()
        if self._again is None:
            self._again = bool(self._failures) and self._stop is None

    def _start(self) -> None:
        why = self._ranks.start()
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

    def _take_events(self) -> None:
        try:
            event = self._events.get(timeout=_TICK_SECONDS)
            while True:
                self._take(event)
                event = self._events.get_nowait()
        except queue.Empty:
            pass

    def _take(self, event: Any) -> None:
        if isinstance(event, Exit):
            self._take_exit(event.index, event.code)
        elif isinstance(event, _Signal):
            self._take_signal(event)
        elif isinstance(event, HostFailed):
            self._lost_first = self._hosts is not None and self._hosts.own > 0
            self._fail(_Failure(text=event.text, code=event.code, lost_host=True))
        elif isinstance(event, HostMissing):
            if self._ranks.have_met:
                self._terminal.say(
                    f"warning: {event.text}; the run continues, as the ranks have met", error=True
                )
            elif not self._ranks.done:
                self._fail(_Failure(text=event.text, code=1, lost_host=True))
        elif isinstance(event, HostNote):
            self._terminal.say(event.text, error=True)
        elif isinstance(event, Message):
            try:
                self._take_message(event)
            except (KeyError, TypeError, ValueError):
                self._terminal.say(
                    f"host {event.host} sent a message {event.kind!r} that this version cannot"
                    " read",
                    error=True,
                )

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
        ranks = () if self._ranks.is_helper(index) else (self._ranks.specs[index].rank,)
        self._fail(
            _Failure(text=text, code=code if code > 0 else 128 - code, certain=certain, ranks=ranks)
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
        if self._control is not None:
            self._control.tell("stop", signal=event.number)

    def _take_message(self, event: Message) -> None:
        assert self._hosts is not None
        values = event.values
        if event.kind == "arrived":
            self._terminal.say(f"connected to {self._hosts.all[event.host]}")
        elif event.kind == "ranks":
            self._elsewhere[event.host] = [RankState(**state) for state in values["states"]]
        elif event.kind == "stop" and self._stop is None:
            self._stop_ranks(_Signal(number=int(values["signal"]), time=time.monotonic()))
        elif event.kind == "failed":
            self._fail(
                _Failure(**{**values["failure"], "ranks": tuple(values["failure"]["ranks"])})
            )
        elif event.kind == "finished":
            self._finished[event.host] = bool(values["stopped"])
            self._elsewhere.pop(event.host, None)
        elif event.kind == "end":
            self._end = int(values["code"])
        elif event.kind == "again":
            self._again = bool(values["again"])

    def _fail(self, failure: _Failure) -> None:
        """Record a failure and tell the other hosts at once, since the first one told counts as the
        first.
        """
        if failure in self._failures:
            return
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures.append(failure)
        if self._control is not None:
            self._control.tell("failed", failure=asdict(failure))

    # ---- checks between events ----

    def _look(self) -> None:
        self._ranks.read_heartbeats()
        self._steps = self._ranks.steps
        self._show()
        if self._failures:
            return
        if self._control is not None and self._ranks.done and not self._told_finished:
            self._told_finished = True
            self._done_at = time.monotonic()
            self._control.tell("finished", stopped=self._was_stopped())
        if self._stop is None:
            self._look_for_stalls()
        elif time.monotonic() - self._stop.time > self._job.stall_limit:
            left = tuple(state.rank for state in self._ranks.states())
            text = (
                f"stopped by {signal_name(self._stop.number)};"
                f" {self._ranks.names(left) if left else 'other hosts'} did not end within"
            )
            text += f" {self._job.stall_limit:g} s (runtime.stall_limit), so all had to"
            self._fail(_Failure(text=text, code=128 + self._stop.number, ranks=left, stalled=True))

    def _look_for_stalls(self) -> None:
        """Look for stalled ranks; host 0 does it for all hosts that it can hear.

        Each host by itself would blame its ranks for another's stall.
        """
        states = self._ranks.states()
        missing = []
        if self._control is not None and self._hosts is not None:
            missing = self._control.missing()
            if self._hosts.own > 0 and not missing:
                if time.monotonic() - self._reported > _REPORT_SECONDS:
                    self._reported = time.monotonic()
                    self._control.tell(
                        "ranks", keep=False, states=[asdict(state) for state in states]
                    )
                return
            states += [state for host in self._elsewhere.values() for state in host]
        if not any(state.idle > self._job.stall_limit for state in states):
            return
        text = f"stalled for {self._job.stall_limit:g} s (runtime.stall_limit)"
        if missing and not self._ranks.have_met:
            self._fail(
                _Failure(
                    text=f"{text}, and {missing[0]} has not come; look whether the run was started"
                    " there",
                    code=1,
                )
            )
            return
        blamed = stalled_ranks(states)
        unknown = [
            f"    how far the ranks of {host} are is not known: its launcher never came"
            for host in missing
        ]
        text = "\n".join([f"{text}:", *(f"    {state.in_words()}" for state in blamed), *unknown])
        self._fail(
            _Failure(text=text, code=1, ranks=tuple(state.rank for state in blamed), stalled=True)
        )

    def _show(self) -> None:
        if self._job.follow:
            self._terminal.copy(self._ranks.new_output())
            self._terminal.live(self._ranks.progress(self._job.steps))
        elif self._terminal.has_live_line:
            self._terminal.live(self._ranks.new_output())

    # ---- end ----

    def _was_stopped(self) -> bool:
        return any(self._ranks.codes.values()) or any(self._finished.values())

    def _is_over(self) -> bool:
        if self._failures:
            settle = _SETTLE_SECONDS_OF_HOSTS if self._job.over_ssh else _SETTLE_SECONDS
            certain = any(failure.certain for failure in self._failures)
            return (
                certain
                or (self._job.over_ssh and self._ranks.done)
                or time.monotonic() - self._failed_at > settle
            )
        if self._hosts is None or self._control is None or not self._ranks.done:
            return self._ranks.done
        if self._end is not None:
            return True
        missing = len(self._control.missing())
        if missing and self._stop is None and not self._control.should_give_up(self._done_at):
            return False
        if self._hosts.own > 0:
            return missing > 0
        return len(self._finished) + missing == len(self._hosts.all) - 1

    def _failure(self) -> _Failure:
        """Return the first failure that is not the consequence of another, if there is one."""
        return next((failure for failure in self._failures if failure.certain), self._failures[0])

    def _tell_end(self, seconds: float) -> int:
        if not self._job.follow:  # until then the line shows progress; then the result replaces it
            self._terminal.keep_live()
        if self._failures:
            failure = self._failure()
            stopped = self._stop is not None and failure.code == 128 + self._stop.number
            lines, ranks = [f"{'' if stopped else 'error: '}{failure.text}"], failure.ranks
            if self._job.over_ssh:
                lines += [f"also: {other.text}" for other in self._failures if other is not failure]
                ranks = tuple(rank for other in self._failures for rank in other.ranks)
            lines += [*self._ranks.tails(ranks, None if self._job.over_ssh else _TAILS)]
            lines += self._ranks.known_errors()
            lines.append(
                f"all {'hosts' if self._job.over_ssh else 'ranks here'} were ended; exit code"
                f" {failure.code}"
            )
            self._terminal.say("\n".join(lines), error=True)
            return failure.code
        if self._end is not None:
            code = self._end
        else:
            code = 128 + self._stop.number if self._stop is not None and self._was_stopped() else 0
            if self._control is not None and self._hosts is not None:
                for host in self._control.missing():
                    text = (
                        f"warning: the launcher of {host} never came, or port"
                        f" {self._hosts.port} is not open; look there how it ended"
                    )
                    self._terminal.say(text, error=True)
                self._control.tell("end", code=code)
        how = (
            f"stopped by {signal_name(code - 128)}"
            if code
            else f"all {'hosts' if self._job.over_ssh else 'ranks'} ended well"
        )
        self._terminal.say(f"{how}, after {seconds:.0f} s")
        return code


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

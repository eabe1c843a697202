"""Supervision of this host's ranks: start them, wait for them, and end all when one fails.

The main thread takes events from one queue: exits, signals and messages of other hosts. It never
waits for a rank, a host or the terminal without a limit.
"""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from common.errors import ConfigError, DataError, signal_name
from common.failures.explain import Found, find_errors, language_of, merged
from common.launcher.host_channel import HostChannel, Hosts, Message
from common.launcher.rank_process import ProcessSpec, RankProcess, RankState, stalled_ranks
from common.launcher.terminal import Terminal
from common.processes.heartbeat import DUMP_SIGNAL
from common.processes.process_tree import Descendants, in_words, watch
from common.run_folder import RESTART_COUNT
from common.whole_numbers import rank_names, shortened, whole_number

_TICK_SECONDS = 0.5
_SETTLE_SECONDS = 1.0
"""Seconds to wait, after a failure that may be a consequence, for its cause."""
_SETTLE_SECONDS_OF_HOSTS = 5.0
_TAILS = 2
_MAX_SEARCHED = 64
"""Logs that are searched for known errors."""
_SAME_SIGNAL_SECONDS = 0.3
"""Seconds within which a repeated signal counts once: ``timeout`` signals the process and its
group.
"""
_DECISION_SECONDS = 30.0
"""Seconds to wait for host 0's decision: longer than it takes to kill its ranks."""
_KILL_SECONDS = 8.0
_LEAVE_SECONDS = 2.0
"""Seconds that helpers, and processes started by ranks, may outlive the ranks."""
_DUMP_SECONDS = 1.0
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

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> _Failure:
        """Return one that a host has told."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})


class _Supervisor:
    def __init__(self, job: Job, number: int, may_restart: MayRestart | None) -> None:
        self._job, self._number, self._may_restart = job, number, may_restart
        self._events: queue.SimpleQueue[Callable[[], None] | Message] = queue.SimpleQueue()
        own = None if job.hosts is None else job.hosts.all[job.hosts.own]
        self._is_first = job.hosts is None or job.hosts.own == 0
        self._here = "" if own is None else f" at {own}"
        address = None if own is None else own.address
        self._processes = [RankProcess(spec, job.log_folder, address) for spec in job.children]
        self._ranks = [process for process in self._processes if not process.spec.name]
        self._shown = min(self._ranks, key=lambda process: process.spec.rank)
        limit = connect_limit({**os.environ, **job.children[0].environment})
        self._limit = job.return_limit if may_restart and number else limit
        self._channel = (
            None
            if job.hosts is None
            else HostChannel(job.hosts, self._events, restarts=may_restart is not None)
        )
        self._descendants = Descendants(_KILL_SECONDS)
        self._terminal = Terminal()
        self._began = time.monotonic()
        self._failures: list[_Failure] = []
        self._failed_at = 0.0
        self._stop: tuple[int, float] | None = None
        """Signal that stops the run, and its time."""
        self._elsewhere: dict[int, Mapping[str, Any]] = {}
        """Last life of other hosts."""
        self._end: Mapping[str, Any] | None = None
        """Word of host 0 at the end: exit code, and whether another attempt follows."""
        self._blamed: _Failure | None = None
        """Failure that host 0 has told at the end."""
        self._lost_first = False
        """Host 0 cannot be heard any more."""
        self._is_ending = False
        self._late_signal = 0
        """First signal after the ranks were ended."""

    def run(self) -> Outcome:
        with ExitStack() as stack:
            stack.callback(self._terminal.close)
            if self._channel is not None:
                stack.callback(self._channel.close)
                own = self._number
                self._number = self._channel.gather(own, self._limit)
                if self._job.when_met is not None:
                    self._job.when_met(max(own, self._number))  # host 0 may have begun anew
            stack.enter_context(self._signals())
            with self._descendants:
                self._start()
                while not self._is_over():
                    self._take_events()
                    self._look()
                if not self._failures:
                    self._wait_for_leavers()
                elif self._failure().stalled:
                    self._show_stacks(self._failure().ranks)
                seconds = time.monotonic() - self._began
                self._is_ending = True
                again = self._decide(seconds)
            again = self._hear_decision(again)
            self._show()
            for process in self._processes:
                process.close()
            if undead := self._descendants.undead:
                self._say_error(
                    f"processes {', '.join(map(str, undead))} do not end after SIGKILL: they wait"
                    " for a disk or a driver; see dmesg"
                )
            code = self._code()
            report = self._tell_end(code, seconds)
            self._take_events(wait=False)
            if self._late_signal and self._failures and self._stop is None:
                code, again = 128 + self._late_signal, False
            return self._outcome(code, seconds, again=again, report=report)

    def _start(self) -> None:
        """Start all processes, up to the first that cannot be started."""
        variables = {} if self._may_restart is None else {RESTART_COUNT: str(self._number)}
        for process in self._processes:
            try:
                pid = process.start(self._descendants, variables)
            except OSError as error:
                text = f"{process.name} could not be started: {error.strerror or error}"
                self._fail(_Failure(text=f"{text}: {process.spec.command[0]}", code=1))
                break
            watch(pid, partial(self._note_exit, process))
        self._terminal.say(
            f"started {self._names()}; logs: {self._logs()}; to stop and save: Ctrl-C, or kill"
            f" {os.getpid()}"
        )

    def _names(self, ranks: Collection[int] | None = None) -> str:
        """Return the numbers or titles of all ranks here, or of some."""
        found = [
            process.spec for process in self._ranks if ranks is None or process.spec.rank in ranks
        ]
        if any(spec.title for spec in found):
            return ", ".join(map(str, found))
        return rank_names([spec.rank for spec in found])

    def _logs(self) -> Path:
        """Return the place of the logs as one name or shell pattern."""
        names = [process.spec.log_folder for process in self._ranks]
        if len(names) > 1:
            names = list(dict.fromkeys(re.sub(r"\d+$", "*", name) for name in names))
        pattern = names[0] if len(names) == 1 else f"{{{','.join(names)}}}"
        return self._job.log_folder / pattern / self._shown.log.path.name

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT, SIGTERM and SIGHUP into events; those ignored, as under nohup, stay
        ignored.
        """
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._note_signal)
            # if it is ignored, exit codes are lost
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(partial(self._take_signal, number, time.monotonic()))

    def _note_exit(self, process: RankProcess, code: int) -> None:
        self._events.put(partial(self._take_exit, process, code))

    # ---- events ----

    def _take_events(self, *, wait: bool = True) -> None:
        """Take the events that are there, after a wait of at most a tick for the first."""
        with suppress(queue.Empty):
            event = self._events.get(wait, _TICK_SECONDS)
            while True:
                if isinstance(event, Message):
                    self._read_message(event)
                else:
                    event()
                event = self._events.get_nowait()

    def _take_exit(self, process: RankProcess, code: int) -> None:
        if self._is_ending:  # killed
            return
        process.code = code
        # a signal to the rank itself, after which all ranks stop together
        if self._stop is None and code in _CLEAN_EXITS and code != 0:
            self._stop = (code - 128, time.monotonic())
            self._terminal.say(
                f"{process.name} was stopped by {signal_name(code - 128)}; waiting for the others"
            )
        if code in _CLEAN_EXITS:
            return
        if self._stop is not None and code == -signal.SIGTERM:
            number = self._stop[0]
            text = (
                f"stopped by {signal_name(number)}; {process.name} ended before it could save, so"
                " the others had to end too"
            )
            self._fail(_Failure(text=text, code=128 + number, certain=False))
            return
        text = f"{process.name} {in_words(code)}; its log: {process.log.path}"
        stopped = [state.rank for state in self._states() if state.is_stopped]
        if stopped:
            text += f"; perhaps because of {self._names(stopped)}, stopped (state T)"
        # a closed connection to a dead peer also leads to exit code 1 or an abort
        certain = code not in (1, -signal.SIGABRT) and not self._job.over_ssh
        ranks = () if process.spec.name else (process.spec.rank,)
        code = code if code > 0 else 128 - code
        self._fail(_Failure(text=text, code=code, certain=certain, ranks=ranks))

    def _take_signal(self, number: int, moment: float) -> None:
        if self._is_ending:
            self._late_signal = self._late_signal or number
        elif self._stop is None:
            self._stop_ranks(number, moment)
        elif moment - self._stop[1] > _SAME_SIGNAL_SECONDS:
            text = f"killed by a second signal, {signal_name(number)}{self._here}"
            self._fail(_Failure(text=text, code=128 + number))

    def _stop_ranks(self, number: int, moment: float) -> None:
        self._stop = (number, moment)
        for process in self._running():
            process.send_signal(signal.SIGTERM)
        self._terminal.say(
            f"{signal_name(number)}: the ranks save at the next step boundary and end; a second"
            " signal kills them"
        )
        if self._channel is not None:
            self._channel.tell("stop", signal=number)

    def _read_message(self, event: Message) -> None:
        try:
            self._take_message(event)
        except (KeyError, TypeError, ValueError):
            self._say_error(
                f"host {event.host} sent a message {event.kind!r} that this version cannot read"
            )

    def _take_message(self, event: Message) -> None:
        values = event.values
        if event.kind == "note":
            self._say_error(values["text"])
        elif event.kind == "lost":
            self._lost_first = not self._is_first
            self._fail(_Failure(text=values["text"], code=1, lost_host=True))
        elif event.kind == "life":
            states = [RankState(**state) for state in values.get("states", ())]
            self._elsewhere[event.host] = {**values, "states": states}
        elif event.kind == "stop" and self._stop is None:
            self._stop_ranks(int(values["signal"]), time.monotonic())
        elif event.kind == "failed":
            self._fail(_Failure.read(values))
        elif event.kind == "end":
            self._end = {"code": int(values["code"]), "again": bool(values["again"])}
            if values["failure"] is not None:
                self._blamed = _Failure.read(values["failure"])

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

    def _running(self) -> list[RankProcess]:
        return [process for process in self._ranks if process.runs]

    def _states(self) -> list[RankState]:
        """Return the states of running ranks."""
        now = time.monotonic()
        return [process.state(now) for process in self._running()]

    @property
    def _done(self) -> bool:
        """Tell whether every rank here has ended; helpers may still run."""
        return all(process.code is not None for process in self._ranks)

    @property
    def _is_stopped(self) -> bool:
        """Tell whether a process here has ended otherwise than well."""
        return any(process.code for process in self._processes)

    def _look(self) -> None:
        for process in self._processes:
            process.read_heartbeat(time.monotonic())
        self._show()
        if self._failures:
            return
        states = self._states()
        if self._channel is not None and not self._is_first:
            self._channel.set_life(
                states=[asdict(state) for state in states],
                done=self._done,
                stopped=self._is_stopped,
            )
        if self._stop is None:
            self._look_for_stalls(states)
        elif time.monotonic() - self._stop[1] > self._job.stall_limit:
            left = tuple(state.rank for state in states)
            text = (
                f"stopped by {signal_name(self._stop[0])};"
                f" {self._names(left) if left else 'other hosts'} did not end within"
                f" {self._job.stall_limit:g} s (runtime.stall_limit), so all had to"
            )
            self._fail(_Failure(text=text, code=128 + self._stop[0], ranks=left, stalled=True))

    def _look_for_stalls(self, states: list[RankState]) -> None:
        """Look for stalled ranks; host 0 does it for all hosts.

        Each host by itself would blame its ranks for another's stall.
        """
        if not self._is_first:
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
        if not self._job.follow:
            return
        shown = self._shown
        self._terminal.copy(shown.log.new_output())
        if shown.runs and shown.last_step >= 0:
            of_all = f" of {self._job.steps}" if self._job.steps else ""
            doing = shown.state(time.monotonic()).doing
            self._terminal.live(f"step {shown.last_step}{of_all}, {doing}")

    def _say_error(self, text: str) -> None:
        self._terminal.say(text, error=True)

    # ---- end ----

    def _is_over(self) -> bool:
        if self._failures:
            settle = _SETTLE_SECONDS_OF_HOSTS if self._job.over_ssh else _SETTLE_SECONDS
            return (
                any(failure.certain for failure in self._failures)
                or (self._job.over_ssh and self._done)
                or time.monotonic() - self._failed_at > settle
            )
        if not self._is_first:
            return self._done and self._end is not None
        others = 0 if self._job.hosts is None else len(self._job.hosts.all) - 1
        finished = sum(bool(life.get("done")) for life in self._elsewhere.values())
        return self._done and finished == others

    def _wait_for_leavers(self) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._descendants.living() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _show_stacks(self, ranks: Collection[int]) -> None:
        """Make hanging ranks write their stacks. Ranks without a heartbeat and stopped ranks
        cannot.
        """
        able = [
            process
            for process, state in zip(self._running(), self._states(), strict=True)
            if state.rank in ranks and state.silent is not None and not state.is_stopped
        ]
        for process in able:
            process.send_signal(DUMP_SIGNAL)
        if able:
            time.sleep(_DUMP_SECONDS)

    def _failure(self) -> _Failure:
        """Return the first failure that is not the consequence of another, if there is one; host
        0's on all hosts, once it has told.
        """
        return self._blamed or next(
            (failure for failure in self._failures if failure.certain), self._failures[0]
        )

    def _code(self) -> int:
        if self._end is not None:
            return int(self._end["code"])
        if self._failures:
            return self._failure().code
        was_stopped = self._is_stopped or any(
            life.get("stopped") for life in self._elsewhere.values()
        )
        return 128 + self._stop[0] if self._stop is not None and was_stopped else 0

    def _outcome(self, code: int, seconds: float, **values: Any) -> Outcome:
        firsts = [process.first_step for process in self._ranks if process.first_step >= 0]
        return Outcome(
            code=code,
            failure=self._failure().text.partition("\n")[0] if self._failures else "",
            first_step=min(firsts, default=-1),
            last_step=max(process.last_step for process in self._ranks),
            seconds=seconds,
            lost_host=bool(self._failures) and self._failure().lost_host,
            number=self._number,
            **values,
        )

    def _decide(self, seconds: float) -> bool:
        """Decide on host 0, or on a single host, whether another attempt follows, and tell the end.

        Others without host 0 try again after a failure.
        """
        again = self._may_restart is not None and bool(self._failures) and self._stop is None
        if self._is_first:
            code = self._code()
            if self._may_restart is not None and again:
                again = self._may_restart(self._outcome(code, seconds))
            if self._channel is not None:
                failure = asdict(self._failure()) if self._failures else None
                self._channel.tell("end", code=code, again=again, failure=failure)
        return again

    def _hear_decision(self, again: bool) -> bool:
        """Return host 0's decision, for which others wait; ``again`` without one."""
        if self._is_first:
            return again
        deadline = time.monotonic() + _DECISION_SECONDS
        while self._end is None and not self._lost_first and time.monotonic() < deadline:
            self._take_events()
        return again if self._end is None else bool(self._end["again"])

    def _tell_end(self, code: int, seconds: float) -> str:
        """Say how the attempt has ended. Returns what is said of a failure."""
        over_ssh = self._job.over_ssh
        all_of = "hosts" if over_ssh else "ranks"
        if not self._failures:
            how = f"stopped by {signal_name(code - 128)}" if code else f"all {all_of} ended well"
            self._terminal.say(f"{how}, after {seconds:.0f} s")
            return ""
        failure = self._failure()
        stopped = self._stop is not None and code == 128 + self._stop[0]
        lines, ranks = [f"{'' if stopped else 'error: '}{failure.text}"], failure.ranks
        if over_ssh:
            lines += [f"also: {other.text}" for other in self._failures if other is not failure]
            ranks = tuple(rank for other in self._failures for rank in other.ranks)
        telling = [process.log for process in self._processes if process.spec.rank in ranks]
        for log in telling if over_ssh else telling[:_TAILS]:
            lines.append(f"last lines of {log.path}:")
            lines += [f"    {line}" for line in log.last_lines()]
        lines += self._known_errors()
        where = "" if over_ssh else " here"
        ended = f"all {all_of}{where} were ended; exit code {code}"
        self._say_error("\n".join([*lines, ended]))
        return "\n".join(lines)

    def _known_errors(self) -> list[str]:
        """Return a line about the known error in the logs of this run that explains most, or none.

        Causes come before ranks that waited, so the logs of all ranks here are searched.
        """
        found: list[Found] = []
        with suppress(DataError):  # a broken catalogue must not hide why the run failed
            logs = [process.log for process in self._processes[:_MAX_SEARCHED]]
            found = merged(find_errors(log.both_ends(), log.path) for log in logs)
        if not found:
            return []
        meaning = found[0].error.meaning[language_of(os.environ)]
        return [
            f"known error {found[0].code}: {meaning}; python tools/doctor.py --explain"
            f" {shlex.quote(str(found[0].path))}"
        ]


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

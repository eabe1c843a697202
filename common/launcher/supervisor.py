"""Supervision of this host's ranks: start them, wait for them, and end all when one fails.

The main thread takes events from one queue: exits, signals and messages of other hosts. It never
waits for a rank, a host or the terminal without a limit.

Host 0 decides for all how an attempt ends. Another host tells it what happens there, and decides by
itself only without it. A single host is host 0.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from common.cluster.environment import connect_limit
from common.errors import DataError, signal_name
from common.failures import Found, find_errors, language_of, merged
from common.interrupts import handling
from common.launcher.host_channel import LOOK_SECONDS, Host, HostChannel, Hosts, Message, host_name
from common.launcher.rank_process import Failure, ProcessSpec, RankProcess, RankState, set_aside, stalled_ranks
from common.launcher.terminal import Terminal
from common.log import rank_names
from common.processes.heartbeat import DUMP_SIGNAL
from common.processes.process_tree import Descendants, in_words, watch
from common.run_folder import RESTART_COUNT, append_attempt

RESTARTABLE = ("train", "finetune")
"""Modes that are started again; the others have nothing to resume."""
_MAX_PAUSE = 60.0
_TICK_SECONDS = 0.5
_SETTLE_SECONDS = 1.0
"""Seconds to wait, after a failure that may be a consequence, for its cause."""
_SETTLE_SECONDS_OF_HOSTS = 5.0
_TAILS = 2
_MAX_SEARCHED_LOGS = 64
_SAME_SIGNAL_SECONDS = 0.3
"""Within them a repeated signal counts once: ``timeout`` signals the process and its group."""
_DECISION_SECONDS = 30.0
"""Seconds to wait, after a failure here, for host 0's decision."""
_KILL_SECONDS = 8.0
_LEAVE_SECONDS = 2.0
"""Seconds that helpers, and processes started by ranks, may outlive the ranks."""
_DUMP_SECONDS = 1.0
_CLEAN_EXITS = (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)
_ALONE = Hosts(all=(Host(address="", ranks=()),), own=0, port=0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job of this host."""

    children: tuple[ProcessSpec, ...]
    log_folder: Path
    """Folder in which mf_parallel{rank}/mindformer.log and env.log are created or appended to."""
    stall_limit: float
    """Seconds without progress after which a rank has failed; math.inf if none is reported."""
    follow: bool = False
    """Show the log of the lowest rank here, with a line of progress below it on a terminal."""
    steps: int | None = None
    """Steps of the whole run, if known."""
    hosts: Hosts = _ALONE
    over_ssh: bool = False
    """Children are launchers on other hosts, so the first to end may not be the cause."""
    return_limit: float = 600.0
    """Seconds to wait before a restart for hosts that have not come back."""
    when_met: Callable[[int], None] | None = None
    """Called with the number of the attempt when the hosts of a run that may restart have met."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of one attempt."""

    code: int
    """Exit code of the launcher."""
    failure: Failure | None = None
    """The failure that counts."""
    first_step: int = -1
    """First step that a rank of this host worked on; -1 if none."""
    last_step: int = -1
    """Last step that a rank of this host worked on; -1 if none."""
    seconds: float = 0.0
    then: str = "ended"
    """``restarted`` if another attempt follows on all hosts, else why none does."""
    report: str = ""
    """All lines about the failure, with the last ones of the logs that tell more."""


def run_attempts(make_job: Callable[[int], Job], *, most: int = 0, folder: Path | None = None) -> Outcome:
    """Run a job, again after a failure that another attempt may overcome, at most ``most`` times.

    make_job: returns the job of an attempt by its number, from 0, for the same hosts and ranks. While it works, and
    ``when_met``, signals act as before this call. folder: of the run, where the host of rank 0 writes a line for each
    attempt if there may be several. Leaves no process behind. Returns the end of the last attempt, whose exit code is
    equal on all hosts:

    0: all ranks ended well. The code of the rank that failed first, or 128+n if signal n killed it. 128+n if signal n
    at a launcher stopped the run. 1: a rank stalled or a host was lost. 2: a host runs with another list of hosts.

    Raises ConfigError, with nothing started, if a log cannot be written or this host's port is not available, and
    RunError if not all hosts come.
    """
    with closing(Terminal()) as terminal:
        return _Supervisor(make_job, most, folder, terminal).run()


def why_not(outcome: Outcome, before: Sequence[Outcome], most: int) -> str:
    """Return why no attempt follows a failure; empty if one does.

    before: failed attempts before it. After one that has worked, a failure at the start is repeated
    once: a device or a port may not be free yet.
    """
    is_lost = outcome.failure is not None and outcome.failure.lost_host
    if outcome.code == 2:
        return "exit code 2 means that a setting or a file was refused, which a restart repeats"
    if not is_lost and not before and outcome.last_step <= outcome.first_step:
        return "it failed before it had finished a step, which a restart would repeat"
    if not is_lost and before and before[-1].last_step == outcome.last_step:
        where = f"step {outcome.last_step}" if outcome.last_step >= 0 else "the start"
        return f"{where} failed twice, so another attempt would fail too"
    if len(before) >= most:
        return f"runtime.max_restarts={most} restarts are used up"
    return ""


def pause(failures: int) -> float:
    """Return the seconds to wait before a restart, after so many failures; 0 for none."""
    return min(2.0 ** (min(failures, 30) - 1), _MAX_PAUSE) if failures else 0.0


class _Supervisor:
    """Supervisor of all attempts of a run on this host."""

    def __init__(self, make_job: Callable[[int], Job], most: int, folder: Path | None, terminal: Terminal) -> None:
        self._make_job, self._most, self._folder = make_job, most, folder
        self._job, self._terminal = make_job(0), terminal
        hosts = self._job.hosts
        self._channel = HostChannel(hosts, restarts=most > 0, say=terminal.say)
        own = hosts.all[hosts.own]
        self._is_first, self._others = hosts.own == 0, len(hosts.all) - 1
        self._host = host_name(own.address) if self._others else ""
        self._here = f" at {own}" if self._others else ""
        self._number = 0
        """Number of the attempt, from 0, as host 0 counts."""
        self._before: list[Outcome] = []
        """Failed attempts."""
        # of one attempt
        self._stops: list[tuple[int, float, str]] = []
        """Signals, their times, and the other hosts that got them. The first stops the run."""
        self._processes: list[RankProcess] = []
        self._ranks: list[RankProcess] = []
        self._failures: list[Failure] = []
        self._failed_at = self._began = 0.0
        self._lives: dict[int, Mapping[str, Any]] = {}
        """Last life of other hosts."""
        self._decides = self._is_first
        """This host ends the attempt by its own decision."""
        self._end: Mapping[str, Any] = {}
        """How host 0 says that the attempt ends."""

    def run(self) -> Outcome:
        """Run attempts until none follows. Signals that are ignored, as under nohup, stay so."""

        def note(number: int, frame: FrameType | None) -> None:
            self._channel.put("signal", signal=number, moment=time.monotonic())

        handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), note)
        handlers[signal.SIGCHLD] = signal.SIG_DFL  # if it is ignored, exit codes are lost
        with handling(handlers) as self._handlers_before, closing(self._channel):
            while True:
                began = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
                outcome = self._attempt()
                self._note_attempt(began, outcome)
                if outcome.then != "restarted":
                    if self._most and outcome.failure:
                        self._terminal.say(f"not restarted: {outcome.then}", error=True)
                    return outcome
                self._before.append(outcome)
                self._number += 1
                self._terminal.say(
                    f"restart {len(self._before)} of {self._most} in"
                    f" {pause(len(self._before)):g} s, from the newest complete checkpoint; Ctrl-C ends the run",
                    error=True,
                )

    def _note_attempt(self, began: str, outcome: Outcome) -> None:
        """Write a line of attempts.jsonl on the host of rank 0, if there may be several."""
        ranks = [child.rank for child in self._job.children if not child.name]
        if not self._most or self._folder is None or 0 not in ranks:
            return
        line = {
            "began": began,
            "seconds": round(outcome.seconds, 1),
            "hosts": list(map(str, self._job.hosts.all)) if self._others else [rank_names(ranks)],
            "first_step": outcome.first_step,
            "last_step": outcome.last_step,
            "exit_code": outcome.code,
            "failure": outcome.failure and outcome.failure.text.partition("\n")[0],
            "then": outcome.then,
        }
        append_attempt(self._folder, line)

    def _attempt(self) -> Outcome:
        self._stops, self._processes, self._failures, self._lives = [], [], [], {}
        self._end, self._decides = {}, self._is_first
        if not self._meet():
            number, _, where = self._stops[0]
            self._terminal.say(f"stopped by {signal_name(number)}{where}, before the ranks were started")
            return Outcome(code=128 + number)
        self._began = time.monotonic()
        with Descendants(_KILL_SECONDS) as descendants:
            self._start(descendants)
            while not self._is_over():
                self._take(self._channel.next(_TICK_SECONDS))
                self._look()
            outcome = self._outcome(**self._end) if self._end else self._decide()
            if outcome.failure is None:
                descendants.wait(_LEAVE_SECONDS)
            elif outcome.failure.stalled:
                self._show_stacks(outcome.failure.ranks)
        self._show()
        if self._job.follow and self._shown.log.new_output():
            log = self._shown.log.path
            self._terminal.say(f"the rest of the output is in {log}; a restart adds a number to that name")
        for process in self._processes:
            process.close()
        if undead := descendants.undead:
            self._terminal.say(
                f"processes {', '.join(map(str, undead))} do not end after SIGKILL: they wait"
                " for a disk or a driver; see dmesg",
                error=True,
            )
        return replace(outcome, report=self._tell_end(outcome))

    def _meet(self) -> bool:
        """Pause before a restart, make its job, and wait until all hosts are ready.

        Returns False if a signal ends the run.
        """
        environment = {**os.environ, **self._job.children[0].environment}
        limit = self._job.return_limit if self._before else connect_limit(environment)
        until = time.monotonic() + pause(len(self._before))
        while self._is_first and time.monotonic() < until:
            if not self._goes_on(self._channel.next(LOOK_SECONDS)):
                return False
        if self._before:
            with handling(self._handlers_before):
                self._job = self._make_job(self._number)
        else:
            self._open_logs()
        own, begun = self._number, self._channel.gather(self._number, limit, self._goes_on)
        if begun is None:
            return False
        self._number = begun
        if self._before:
            kept = [set_aside(self._job.log_folder / child.log) for child in self._job.children]
            if any(kept):
                self._terminal.say(f"logs of the attempt before: {next(filter(None, kept))}, and beside it")
            self._open_logs()
        if self._job.when_met is not None:
            with handling(self._handlers_before):
                self._job.when_met(max(own, begun))  # host 0 may have begun anew
        return True

    def _goes_on(self, event: Message | None) -> bool:
        """Take an event before the ranks are started. Returns False if a signal ends the run."""
        if event is not None and event.kind in ("signal", "stop"):
            self._note_stop(event)
        # host 0 may have begun before it hears of a signal here; else it answers or leaves
        return not self._stops or (len(self._stops) == 1 and self._channel.has_first)

    def _open_logs(self) -> None:
        folder = self._job.log_folder
        self._processes = [RankProcess(spec, folder, self._host) for spec in self._job.children]
        self._ranks = [process for process in self._processes if not process.spec.name]
        self._shown = min(self._ranks, key=lambda process: process.spec.rank)

    def _start(self, descendants: Descendants) -> None:
        """Start all processes, up to the first that cannot be started."""
        variables = {RESTART_COUNT: str(self._number)} if self._most else {}
        for process in self._processes:
            try:
                pid = process.start(descendants, variables)
            except OSError as error:
                text = f"{process.name} could not be started: {error.strerror or error}"
                self._fail(Failure(text=f"{text}: {process.spec.command[0]}", code=1))
                break
            watch(pid, partial(self._channel.put, "exit", process=process))
        self._terminal.say(
            f"started {self._names()}; logs: {self._logs()}; to stop and save: Ctrl-C, or kill {os.getpid()}"
        )
        if self._stops:
            self._stop_ranks()

    def _names(self, ranks: Collection[int] | None = None) -> str:
        """Return the numbers or titles of all ranks here, or of some."""
        found = [process.spec for process in self._ranks if ranks is None or process.spec.rank in ranks]
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

    # ---- events ----

    def _take(self, event: Message | None) -> None:
        if event is None:
            return
        kind, values = event.kind, event.values
        if kind == "exit":
            self._take_exit(**values)
        elif kind in ("signal", "stop"):
            if not self._note_stop(event):
                return
            if len(self._stops) == 1:
                self._stop_ranks()
            elif kind == "signal":
                self._decides = True
                number = int(values["signal"])
                text = f"killed by a second signal, {signal_name(number)}{self._here}"
                self._fail(Failure(text=text, code=128 + number))
        elif kind == "life":
            self._lives[event.host] = values
        elif kind == "failed":
            self._fail(Failure(**values))
        elif kind == "lost":
            self._decides = True
            self._fail(Failure(text=values["text"], code=1, lost_host=True))
        elif kind == "end":
            self._end = values

    def _take_exit(self, process: RankProcess, code: int) -> None:
        if process not in self._processes:  # killed at the end of an attempt
            return
        process.code = code
        # a signal to the rank itself, after which all ranks stop together
        if not self._stops and code in _CLEAN_EXITS and code != 0:
            self._stops.append((code - 128, time.monotonic(), ""))
            self._terminal.say(f"{process.name} was stopped by {signal_name(code - 128)}; waiting for the others")
        if code in _CLEAN_EXITS:
            return
        if self._stops and code == -signal.SIGTERM:
            number = self._stops[0][0]
            text = (
                f"stopped by {signal_name(number)}; {process.name} ended before it could save, so"
                " the others had to end too"
            )
            self._fail(Failure(text=text, code=128 + number, certain=False))
            return
        text = f"{process.name} {in_words(code)}; its log: {process.log.path}"
        # a closed connection to a dead peer also leads to exit code 1 or an abort
        certain = code not in (1, -signal.SIGABRT) and not self._job.over_ssh
        ranks = [] if process.spec.name else [process.spec.rank]
        code = code if code > 0 else 128 - code
        self._fail(Failure(text=text, code=code, certain=certain, ranks=ranks))

    def _note_stop(self, event: Message) -> bool:
        """Note a signal here or elsewhere, and tell the other hosts of the first.

        Returns False for one that was sent twice.
        """
        values = event.values
        moment = float(values.get("moment", time.monotonic()))
        is_own = event.kind == "signal"
        if self._stops and is_own and moment - self._stops[0][1] <= _SAME_SIGNAL_SECONDS:
            return False
        number, where = int(values["signal"]), str(values.get("where", ""))
        self._stops.append((number, moment, where))
        if len(self._stops) == 1:
            self._channel.tell("stop", signal=number, where=where or self._here)
        return True

    def _stop_ranks(self) -> None:
        for process in self._running():
            process.send_signal(signal.SIGTERM)
        self._terminal.say(
            f"{signal_name(self._stops[0][0])}: the ranks save at the next step boundary and end; a"
            " second signal kills them"
        )

    def _fail(self, failure: Failure) -> None:
        """Record a failure, and tell host 0."""
        if failure in self._failures:
            return
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures.append(failure)
        if not self._is_first:
            self._channel.tell("failed", **vars(failure))

    # ---- checks between events ----

    def _running(self) -> list[RankProcess]:
        return [process for process in self._ranks if process.runs]

    def _states(self) -> list[RankState]:
        now = time.monotonic()
        return [process.state(now) for process in self._running()]

    @property
    def _done(self) -> bool:
        """Tell whether every rank here has ended; helpers may still run."""
        return all(process.code is not None for process in self._ranks)

    def _look(self) -> None:
        for process in self._processes:
            process.read_heartbeat(time.monotonic())
        self._show()
        if self._failures:
            return
        states = self._states()
        if not self._is_first:
            self._channel.set_life(
                states=states,
                done=self._done,
                stopped=any(process.code for process in self._processes),
            )
        if not self._stops:
            if self._is_first:
                self._look_for_stalls(states)
        elif time.monotonic() - self._stops[0][1] > self._job.stall_limit:
            left = [state.rank for state in states]
            text = (
                f"stopped by {signal_name(self._stops[0][0])};"
                f" {self._names(left) if left else 'other hosts'} did not end within"
                f" {self._job.stall_limit:g} s (runtime.stall_limit), so all had to"
            )
            self._fail(Failure(text=text, code=128 + self._stops[0][0], ranks=left, stalled=True))

    def _look_for_stalls(self, states: list[RankState]) -> None:
        """Look for stalled ranks of all hosts: each by itself would blame its own for others'."""
        lives = self._lives.values()
        states = states + [state for life in lives for state in life["states"]]
        if not any(state.idle > self._job.stall_limit for state in states):
            return
        blamed = stalled_ranks(states)
        lines = [f"stalled for {self._job.stall_limit:g} s (runtime.stall_limit):"]
        lines += [f"    {state.in_words()}" for state in blamed]
        self._fail(Failure(text="\n".join(lines), code=1, ranks=[state.rank for state in blamed], stalled=True))

    def _show(self) -> None:
        if not self._job.follow:
            return
        shown = self._shown
        while self._terminal.has_room and (text := shown.log.new_output()):
            self._terminal.copy(text)  # what finds no room stays in the log for the next look
        if shown.runs and shown.last_step >= 0:
            of_all = f" of {self._job.steps}" if self._job.steps else ""
            doing = shown.state(time.monotonic()).doing
            self._terminal.live(f"step {shown.last_step}{of_all}, {doing}")

    # ---- end ----

    def _is_over(self) -> bool:
        if self._failures and not self._end:
            over_ssh = self._job.over_ssh
            settle = _SETTLE_SECONDS_OF_HOSTS if over_ssh else _SETTLE_SECONDS
            limit = settle if self._decides else _DECISION_SECONDS
            return (
                (self._decides and any(failure.certain for failure in self._failures))
                or (over_ssh and self._done)
                or time.monotonic() - self._failed_at > limit
            )
        if not self._is_first:
            return bool(self._end)
        finished = sum(bool(life["done"]) for life in self._lives.values())
        return self._done and finished == self._others

    def _show_stacks(self, ranks: Collection[int]) -> None:
        """Make hanging ranks write their stacks, which stopped ones cannot."""
        able = [
            process
            for process, state in zip(self._running(), self._states(), strict=True)
            if state.rank in ranks and state.silent is not None and not state.is_stopped
        ]
        for process in able:
            process.send_signal(DUMP_SIGNAL)
        if able:
            time.sleep(_DUMP_SECONDS)

    def _decide(self) -> Outcome:
        """Return how the attempt ends; host 0 decides for all, and tells."""
        failure = max(self._failures, key=lambda one: one.certain, default=None)  # the first that is certain
        # whether a process has ended otherwise than well
        ends = [process.code for process in self._processes]
        ends += [life["stopped"] for life in self._lives.values()]
        code = 128 + self._stops[0][0] if self._stops and any(ends) else 0
        outcome = self._outcome(code if failure is None else failure.code, failure)
        if failure is not None:
            then = why_not(outcome, self._before, self._most) or "restarted"
            outcome = replace(outcome, then="stopped by a signal" if self._stops else then)
        if self._is_first:
            self._channel.tell("end", code=outcome.code, failure=failure, then=outcome.then)
        return outcome

    def _outcome(self, code: int, failure: Failure | None, then: str = "ended") -> Outcome:
        firsts = [process.first_step for process in self._ranks if process.first_step >= 0]
        return Outcome(
            code=code,
            failure=failure,
            first_step=min(firsts, default=-1),
            last_step=max((process.last_step for process in self._ranks), default=-1),
            seconds=time.monotonic() - self._began,
            then=then,
        )

    def _tell_end(self, outcome: Outcome) -> str:
        """Say how the attempt has ended. Returns what is said of a failure."""
        code, failure = outcome.code, outcome.failure
        over_ssh = self._job.over_ssh
        all_of = "hosts" if over_ssh else "ranks"
        if failure is None:
            how = f"stopped by {signal_name(code - 128)}" if code else f"all {all_of} ended well"
            self._terminal.say(f"{how}, after {outcome.seconds:.0f} s")
            return ""
        stopped = bool(self._stops) and code == 128 + self._stops[0][0]
        lines, ranks = [f"{'' if stopped else 'error: '}{failure.text}"], failure.ranks
        if over_ssh:
            lines += [f"also: {other.text}" for other in self._failures if other is not failure]
            ranks = [rank for other in self._failures for rank in other.ranks]
        telling = [process.log for process in self._processes if process.spec.rank in ranks]
        for log in telling if over_ssh else telling[:_TAILS]:
            lines.append(f"last lines of {log.path}:")
            lines += [f"    {line}" for line in log.last_lines()]
        lines += self._known_errors()
        here = "" if over_ssh else " here"
        self._terminal.say("\n".join([*lines, f"all {all_of}{here} were ended; exit code {code}"]), error=True)
        return "\n".join(lines)

    def _known_errors(self) -> list[str]:
        """Return a line about the known error in the logs of all ranks here that explains most."""
        found: list[Found] = []
        with suppress(DataError):  # a broken catalogue must not hide why the run failed
            logs = [process.log for process in self._processes[:_MAX_SEARCHED_LOGS]]
            found = merged(find_errors(log.both_ends(), log.path) for log in logs)
        if not found:
            return []
        meaning = found[0].error.meaning[language_of(os.environ)]
        return [
            f"known error {found[0].code}: {meaning}; python tools/doctor.py --explain"
            f" {shlex.quote(str(found[0].path))}"
        ]

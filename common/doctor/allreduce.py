"""A real all-reduce with one process per rank: started, watched by stage, and judged."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from common.cluster.places import RankPlacement
from common.cluster.rank_environment import FOREIGN
from common.doctor.report import Check, error, ok
from common.errors import signal_name
from common.processes.monitor import STOPPED
from common.processes.ranks import ProcessSpec, Ranks
from common.structured_files import MalformedError, parse_json

STAGES = ("", "started", "imported", "connected", "group made", "reduced")
"""Stages of a rank, in order; "" means that its program has not started. MindSpore has no
"connected".
"""
MARK = "doctor: "
"""Start of a line for the doctor in a rank's log: MARK, then a JSON object with "stage"."""
GRACE_SECONDS = 2.0
"""Seconds after a rank's death in which others may still die; one of them may be the cause."""
_LOG_LINES = 12
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class TrialRank:
    """State of a rank. code: its exit code, -n if signal n ended it, None while it runs.

    ended: seconds after the start. state: of its process, as ``process_state`` returns it. result:
    values that the rank reported with its last stage.
    """

    rank: int
    stage: str = ""
    state: str = ""
    code: int | None = None
    ended: float = 0.0
    result: Mapping[str, Any] | None = None
    log: tuple[str, ...] = ()
    log_path: str = ""

    @property
    def failed(self) -> bool:
        return self.stage == "wrong sum" or (self.code is not None and self.stage != "reduced")


@dataclass(frozen=True, kw_only=True)
class AllReduceTrial:
    """Description of the trial for messages: gloo, nccl, hccl or mccl over ranks at ``places``,
    which connect at ``address``.
    """

    places: Sequence[RankPlacement]
    backend: str
    communication: str
    address: str
    limit: float

    def name(self, rank: int) -> str:
        place = self.places[rank]
        return f"rank {rank} (device {place.device_id} of {place.host})"


class TrialRanks(Ranks):
    """Processes of this host. As a context manager, it starts them and leaves none behind.

    environments: rank -> its variables; rank -1 is MindSpore's scheduler. Logs go to
    ``folder``/rank_N.log.
    """

    def __init__(
        self, command: Sequence[str], environments: Mapping[int, Mapping[str, str]], folder: Path
    ) -> None:
        names = {-1: "scheduler"}
        super().__init__(
            [
                ProcessSpec(
                    rank=rank,
                    command=tuple(command),
                    environment=environment,
                    name=names.get(rank, ""),
                )
                for rank, environment in environments.items()
            ]
        )
        self._folder = folder
        self._ended: dict[int, tuple[int, float]] = {}
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            for index in range(len(self.specs)):
                self.start_one(index, without=FOREIGN)
        except BaseException:
            self.__exit__()
            raise
        return self

    def name(self, index: int) -> str:
        return str(self.specs[index])

    def log(self, index: int) -> Path:
        rank = self.specs[index].rank
        return self._folder / ("scheduler.log" if rank < 0 else f"rank_{rank}.log")

    def open_log(self, index: int, environment: Mapping[str, str]) -> IO[bytes]:
        return self.log(index).open("wb")

    def ended(self, index: int, code: int) -> None:
        self._ended[index] = code, time.monotonic() - self._start

    def show_stacks(self) -> None:
        """Make the ranks that have not reduced write their stacks to their logs."""
        waiting = {
            state.rank
            for state in self.states()
            if state.stage not in ("", "reduced") and state.code is None
        }
        self.dump_stacks([index for index, spec in enumerate(self.specs) if spec.rank in waiting])

    def states(self) -> list[TrialRank]:
        """Return the current state of each rank; the scheduler only if it failed."""
        found = [self._state(index) for index in self.monitors]
        return [state for state in found if state.rank >= 0 or state.code]

    def _state(self, index: int) -> TrialRank:
        code, ended = self._ended.get(index, (None, 0.0))
        text = self.log(index).read_text(encoding="utf-8", errors="replace")
        stage, result = "", None
        for line in text.splitlines():
            if line.startswith(MARK):
                # an incomplete line
                with suppress(MalformedError, KeyError, TypeError):
                    # a damaged sum may be NaN
                    told = parse_json(line.removeprefix(MARK), finite=False)
                    stage, result = str(told["stage"]), told
        return TrialRank(
            rank=self.specs[index].rank,
            stage=stage,
            state=self.monitors[index].process_state if code is None else "",
            code=code,
            ended=ended,
            result=result,
            log=tuple(
                line[:200]
                for line in text.splitlines()
                if line.strip() and not line.startswith(MARK)
            )[-_LOG_LINES:],
            log_path=str(self.log(index)),
        )


def watch(
    local: TrialRanks,
    trial: AllReduceTrial,
    *,
    remote: Callable[[], Sequence[TrialRank]] = tuple,
    lost: Callable[[], Sequence[str]] = tuple,
) -> Check:
    """Wait until every rank has reduced, one has failed, a host is lost, or the limit is over, and
    judge.

    remote: the ranks of other hosts; lost: one sentence per host that has fallen silent.
    """
    deadline = time.monotonic() + trial.limit
    over = deadline
    while True:
        seen = [*local.states(), *remote()]
        if len(seen) >= len(trial.places) and all(state.stage == "reduced" for state in seen):
            break
        now = time.monotonic()
        if over == deadline and (lost() or any(state.failed for state in seen)):
            over = min(now + GRACE_SECONDS, deadline)
        if now >= over:
            local.show_stacks()
            seen = [*local.states(), *remote()]
            break
        time.sleep(_POLL_SECONDS)
    return judge(seen, trial, lost())


def judge(seen: Sequence[TrialRank], trial: AllReduceTrial, lost: Sequence[str] = ()) -> Check:
    """Return one check with the speed of the ranks, or with those that failed and their last
    stage.
    """
    known = {state.rank: state for state in seen}
    states = [known.get(place.rank, TrialRank(rank=place.rank)) for place in trial.places]
    name = "all-reduce"
    ranks = f"{len(states)} ranks" if len(states) > 1 else "1 rank"
    if all(state.stage == "reduced" for state in states):
        return ok(name, f"{ranks}, {trial.communication}: the sum is right; {_speed(states)}")
    failed = [
        state for state in [*states, *(state for state in seen if state.rank < 0)] if state.failed
    ]
    if lost:  # failures here may be consequences
        consequences = [_blame_of_failure(failed, trial)[0]] if failed else []
        return error(
            name,
            "\n".join([*lost, *consequences]),
            "check that the doctor still runs there; its own report has details",
        )
    if failed:
        return error(name, *_blame_of_failure(failed, trial))
    waiting = [state for state in states if state.stage != "reduced"]
    stopped = [state for state in waiting if state.state in STOPPED]
    if stopped:
        named = _listed(stopped, trial)
        return error(
            name,
            f"{named} did not answer within {trial.limit:g} s: stopped by a signal",
            "kill -CONT its process, or end it",
        )
    behind = min(STAGES.index(state.stage) for state in waiting)
    culprits = [state for state in waiting if STAGES.index(state.stage) == behind]
    what, remedy = _hindrance(STAGES[behind], trial)
    whom = (
        f"none of {ranks}"
        if len(culprits) == len(states) > 1
        else f"{_listed(culprits, trial)} did not answer"
    )
    where = (
        ""
        if len(culprits) == len(states)
        else f"; the other {len(states) - len(culprits)} got further"
    )
    return error(name, f"{whom} within {trial.limit:g} s: {what}{where}{_logs(culprits)}", remedy)


def _blame_of_failure(failed: Sequence[TrialRank], trial: AllReduceTrial) -> tuple[str, str]:
    """Return the first rank that failed, with the end of its log.

    Peers of a killed rank fail by its closed connections, so a signal is the cause.
    """
    first = min(state.ended for state in failed)
    state = min(
        failed,
        key=lambda one: (
            not (one.code and one.code < 0 and one.ended < first + GRACE_SECONDS),
            one.ended,
            one.rank,
        ),
    )
    named = trial.name(state.rank) if state.rank >= 0 else "MindSpore's scheduler"
    if state.stage == "wrong sum":
        result = state.result or {}
        remedy = (
            "a link or the library is broken; NCCL_DEBUG=INFO or the plog folder of HCCL may show"
            " which"
        )
        return f"{named} got {result.get('found')} instead of {result.get('expected')}", remedy
    how = (
        f"was killed by {signal_name(-state.code)}"
        if state.code and state.code < 0
        else f"ended with exit code {state.code}"
    )
    after = f"after '{state.stage}'" if state.stage else "before its program began"
    others = len(failed) - 1
    more = f"; {others} more failed after it" if others else ""
    remedy = (
        "out of memory? `dmesg | grep -i oom`"
        if state.code == -signal.SIGKILL
        else "fix the error in its log"
    )
    return f"{named} {how} {after}{more}{_logs([state])}", remedy


def _hindrance(stage: str, trial: AllReduceTrial) -> tuple[str, str]:
    """Return what a rank was doing after ``stage``, and a remedy."""
    if stage == "":
        return (
            "its program did not start",
            "check the host's load and file system; for more time: --time_limit",
        )
    if stage == "started":
        return (
            f"still importing {trial.backend}",
            "check for a slow file system or a busy host; for more time: --time_limit",
        )
    link = {
        "gloo": "GLOO_SOCKET_IFNAME must name the interface that leads to the other hosts",
        "nccl": "NCCL_DEBUG=INFO shows more; NCCL_SOCKET_IFNAME must name the interface that leads"
        " to the other hosts",
        "hccl": "`hccn_tool -i N -link -g` must say UP, and `hccn_tool -i N -ping -g address IP`"
        " reach the others' device_ip",
        "mccl": "MS_TOPO_TIMEOUT and the scheduler's log show more",
    }[trial.communication]
    if stage == "imported":
        return (
            f"not connected to {trial.address}",
            f"check that every host can reach {trial.address}, past firewalls and by the right"
            f" route? {link}",
        )
    if stage == "connected":
        return f"connected to {trial.address}, but no {trial.communication} group was made", link
    return "hung in the all-reduce itself", link


def _speed(states: Sequence[TrialRank]) -> str:
    """Return the speed of the slowest rank.

    In a ring all-reduce each rank sends and receives 2 (n - 1) / n of the bytes; other algorithms
    are counted alike.
    """
    results = [state.result or {} for state in states]
    first, seconds, ready = (
        max(float(result.get(key, 0)) for result in results)
        for key in ("first", "seconds", "ready")
    )
    size = float(results[0].get("bytes", 0))
    ring = 2 * (len(states) - 1) / len(states)
    rate = f" ({size * ring / seconds / 1e9:.2f} GB/s a rank)" if ring and seconds else ""
    return (
        f"{size / 2**20:.0f} MiB in {seconds * 1e3:.1f} ms{rate}, the first in"
        f" {first * 1e3:.0f} ms, group ready after {ready:.1f} s"
    )


def _listed(states: Sequence[TrialRank], trial: AllReduceTrial) -> str:
    shown = [trial.name(state.rank) for state in states[:8]]
    return ", ".join(shown) + (f" and {len(states) - 8} more" if len(states) > 8 else "")


def _logs(states: Sequence[TrialRank]) -> str:
    """Return the end of the first failed rank's log, and its file."""
    state = states[0]
    if not state.log_path:
        return ""
    return "\n".join(
        [
            "",
            f"its log, {state.log_path}, ends with:" if state.log else f"its log: {state.log_path}",
            *state.log,
        ]
    )

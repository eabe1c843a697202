"""Attempts of a run: what follows a failure, the pause before it, and a line for each attempt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from common.launcher.rank_logs import set_aside
from common.launcher.supervisor import Job, Outcome, run_attempt
from common.launcher.terminal import tell
from common.run_folder import append_attempt
from common.whole_numbers import rank_names

RESTARTABLE = ("train", "finetune")
"""Modes that are started again; the others have nothing to resume."""
_FIRST_PAUSE, _MAX_PAUSE = 1.0, 60.0


def run_attempts(make_job: Callable[[int], Job], *, most: int, folder: Path) -> int:
    """Run a job, again after each failure that another attempt may overcome, up to ``most`` times.

    make_job: returns the job of an attempt by its number, from 0. folder: of the run; the host of
    rank 0 writes a line for each attempt there, if ``most`` is not 0. Returns the exit code of the
    last attempt.
    """
    before: list[Outcome] = []
    number = 0
    while True:
        job = make_job(number)
        may_restart = partial(_may_restart, before=before, most=most) if most else None
        kept = [set_aside(job.log_folder / child.log) for child in job.children] if before else []
        if any(kept):
            tell(f"logs of the attempt before: {next(filter(None, kept))}, and beside it")
        began = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        outcome = run_attempt(job, number=number, may_restart=may_restart)
        if most and any(child.rank == 0 and not child.name for child in job.children):
            append_attempt(folder, _line(began, outcome, job, before, most))
        if not outcome.again:
            if most and outcome.failure:
                why = why_not(outcome, before, most) or "host 0 says so"
                tell(f"not restarted: {why}", error=True)
            return outcome.code
        seconds = pause(len(before))
        before.append(outcome)
        number = outcome.number + 1
        tell(
            f"restart {len(before)} of {most} in {seconds:g} s, from the newest complete"
            " checkpoint; Ctrl-C ends the run",
            error=True,
        )
        time.sleep(seconds)


def _may_restart(outcome: Outcome, *, before: Sequence[Outcome], most: int) -> bool:
    return not why_not(outcome, before, most)


def why_not(outcome: Outcome, before: Sequence[Outcome], most: int) -> str:
    """Return why no attempt follows a failure; empty if one does.

    before: failed attempts before it. After one that has worked, a failure at the start is repeated
    once: a device or a port may not be free yet.
    """
    if outcome.code == 2:
        return "exit code 2 means that a setting or a file was refused, which a restart repeats"
    if not outcome.lost_host and not before and outcome.last_step <= outcome.first_step:
        return "it failed before it had finished a step, which a restart would repeat"
    if not outcome.lost_host and before and before[-1].last_step == outcome.last_step:
        where = f"step {outcome.last_step}" if outcome.last_step >= 0 else "the start"
        return f"{where} failed twice, so another attempt would fail too"
    if len(before) >= most:
        return f"runtime.max_restarts={most} restarts are used up"
    return ""


def pause(failures: int) -> float:
    """Return the seconds to wait before a restart, after so many failures before this one."""
    return min(_FIRST_PAUSE * 2.0 ** min(failures, 30), _MAX_PAUSE)


def _line(
    began: str,
    outcome: Outcome,
    job: Job,
    before: Sequence[Outcome],
    most: int,
) -> dict[str, Any]:
    ranks = [child.rank for child in job.children if not child.name]
    hosts = [rank_names(ranks)] if job.hosts is None else [str(host) for host in job.hosts.all]
    if outcome.again:
        then = "restarted"
    else:
        then = why_not(outcome, before, most) if outcome.failure else "ended"
    return {
        "began": began,
        "seconds": round(outcome.seconds, 1),
        "hosts": hosts,
        "first_step": outcome.first_step,
        "last_step": outcome.last_step,
        "exit_code": outcome.code,
        "failure": outcome.failure or None,
        "then": then,
    }

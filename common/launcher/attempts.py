"""Attempts of a run: how one ended, what follows a failure, the pause before it, and a line for
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RESTARTABLE = ("train", "finetune")
"""Modes that are started again; the others have nothing to resume."""
_MAX_PAUSE = 60.0


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
    """Return the seconds to wait before a restart, after so many failures; 0 for none."""
    return min(2.0 ** (min(failures, 30) - 1), _MAX_PAUSE) if failures else 0.0


def line_of(
    outcome: Outcome, began: str, hosts: Sequence[str], before: Sequence[Outcome], most: int
) -> dict[str, Any]:
    """Return the line about an attempt in attempts.jsonl."""
    then = why_not(outcome, before, most) if outcome.failure else "ended"
    return {
        "began": began,
        "seconds": round(outcome.seconds, 1),
        "hosts": hosts,
        "first_step": outcome.first_step,
        "last_step": outcome.last_step,
        "exit_code": outcome.code,
        "failure": outcome.failure or None,
        "then": "restarted" if outcome.again else then,
    }

"""All-reduce of one host, or of several whose doctors run at the same time.

Host 0 judges, and the others repeat its report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from common.cluster.places import Placement
from common.doctor.allreduce import AllReduceTrial, TrialRanks, watch
from common.doctor.peer_channel import FirstHost, OtherHost
from common.doctor.report import Check, error, exit_code
from common.errors import RunError

SPARE_SECONDS = 10.0
"""Seconds that the others wait longer than host 0, so that it judges."""
_TELL_SECONDS = 0.3


def all_reduce(
    ranks: TrialRanks,
    trial: AllReduceTrial,
    places: Placement,
    address: tuple[str, int],
    job: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> list[Check]:
    """Start ``ranks`` and judge. Each wait ends after ``trial.limit`` seconds, or a few more on
    other hosts.

    address: where the doctor of host 0 listens. job: facts that must be equal on all hosts. facts:
    those that should be.
    """
    if len(places.hosts) == 1:
        with ranks:
            _announce(ranks, trial)
            return [watch(ranks, trial)]
    own = places.hosts.index(places.own_host)
    try:
        return (
            _lead(ranks, trial, places, address, job, facts)
            if own == 0
            else _follow(ranks, trial, own, address, job, facts)
        )
    except RunError as reason:
        return [error("hosts", str(reason), "")]


def _lead(
    ranks: TrialRanks,
    trial: AllReduceTrial,
    places: Placement,
    address: tuple[str, int],
    job: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> list[Check]:
    with FirstHost(*address, places, job, facts) as first:
        _say(
            f"waiting for the doctors of {len(places.hosts) - 1} more hosts at"
            f" {address[0]}:{address[1]}, at most {trial.limit:g} s"
        )
        checks = first.gather(trial.limit)
        if exit_code(checks):
            checks.append(error("all-reduce", "not tried", "fix the errors above first"))
        else:
            first.begin()
            with ranks:
                _announce(ranks, trial)
                checks.append(watch(ranks, trial, remote=first.states, lost=first.lost))
        first.conclude(checks)
    return checks


def _follow(
    ranks: TrialRanks,
    trial: AllReduceTrial,
    own: int,
    address: tuple[str, int],
    job: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> list[Check]:
    with OtherHost(*address, own, job, facts, trial.limit) as other:
        verdict = other.wait_for_begin(trial.limit + SPARE_SECONDS)
        if verdict is not None:
            return verdict
        deadline = time.monotonic() + trial.limit + SPARE_SECONDS
        with ranks:
            _announce(ranks, trial)
            while time.monotonic() < deadline:
                if (verdict := other.tell(ranks.states())) is not None:
                    return verdict
                time.sleep(_TELL_SECONDS)
    found = f"no report from host 0, {address[0]}, within {trial.limit + SPARE_SECONDS:g} s"
    return [error("all-reduce", found, "its own report may say more")]


def _announce(ranks: TrialRanks, trial: AllReduceTrial) -> None:
    """Name the process of each rank, to look at or end while it runs."""
    names = [f"rank {spec.rank}" if spec.rank >= 0 else "the scheduler" for spec in ranks.specs]
    shown = ", ".join(f"{names[index]} is process {pid}" for index, pid in ranks.pids().items())
    _say(f"all-reduce over {trial.communication}, at most {trial.limit:g} s: {shown}")


def _say(line: str) -> None:
    """Print progress to standard error, since standard output is for the report."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()

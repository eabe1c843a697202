"""Trial of a real all-reduce: started by the launcher as any job, and judged by what it reports.

The ranks exchange the facts of their hosts over the network that is tried, so every host's doctor has the same report.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

from common.cluster.places import Placement
from common.doctor.report import Check, error, ok, warning
from common.errors import ConfigError, RunError
from common.launcher.supervisor import Job, Outcome, run_attempts
from common.structured_files import MalformedError, parse_json

STAGES = ("", "started", "imported", "connected", "group made", "reduced")
"""Stages of a rank, in order; "" means that its program has not started. MindSpore has no "connected"."""
MARK = "doctor: "
"""Start of a line for the doctor in a rank's log: MARK, then a JSON object with "stage"."""
FACTS = "GPT2_DOCTOR_FACTS"
"""Variable of a rank with the facts of its host as JSON, such as versions."""
CLOCK_SECONDS = 1.0


def try_all_reduce(job: Job, places: Placement, communication: str, address: str) -> list[Check]:
    """Start the job's ranks, and judge. Progress goes to standard error.

    communication: gloo, nccl, hccl or mccl over ranks at ``places``, which connect at ``address``.
    """
    try:
        with redirect_stdout(sys.stderr):
            outcome = run_attempts(lambda number: job)
        # a rank that somebody else ends with such a signal is an error
        is_own = not outcome.report.startswith("error: ")
        if is_own and outcome.code - 128 in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(outcome.code - 128)  # the doctor itself was stopped
    except (ConfigError, RunError) as reason:
        return [error("hosts", str(reason), "")]
    ranks = {child.rank: child.log_folder for child in job.children if not child.name}
    last: dict[int, Mapping[str, Any]] = {}
    for rank, folder in ranks.items():
        last[rank] = {"stage": ""}
        log = (job.log_folder / folder / "mindformer.log").read_text(encoding="utf-8", errors="replace")
        for line in log.splitlines():
            if line.startswith(MARK):
                with suppress(MalformedError):  # an incomplete line
                    last[rank] = parse_json(line.removeprefix(MARK))
    return judge(outcome, last, places, communication, address)


def judge(
    outcome: Outcome, last: Mapping[int, Mapping[str, Any]], places: Placement, communication: str, address: str
) -> list[Check]:
    """Return the checks of facts and of the all-reduce: its speed, or the ranks that failed.

    last: the last report of each rank of this host.
    """
    reports = list(last.values())
    if outcome.code == 0 and all(report["stage"] == "reduced" for report in reports):
        count, facts = len(places.all), reports[0]["facts"]
        ranks = f"{count} ranks" if count > 1 else "1 rank"
        text = f"{ranks}, {communication}: the sum is right; {_speed(facts)}"
        return [*_check_facts(facts, places), ok("all-reduce", text)]
    wrong = next((rank for rank in last if last[rank]["stage"] == "wrong sum"), None)
    if wrong is not None:
        found = f"{last[wrong].get('found')} instead of {last[wrong].get('expected')}"
        remedy = "a link or the library is broken; NCCL_DEBUG=INFO or the plog folder of HCCL may"
        return [error("all-reduce", f"{_name(places, wrong)} got {found}", f"{remedy} show which")]
    if outcome.code == 0:
        rank = next(rank for rank in last if last[rank]["stage"] != "reduced")
        stage = last[rank]["stage"]
        found = f"{_name(places, rank)} ended too early, after '{stage}'"
        return [error("all-reduce", found, "fix the error in its log")]
    found = outcome.report.replace("runtime.stall_limit", "--time_limit")
    stage = next((stage for stage in STAGES[1:] if f", {stage}" in found), "")
    is_stall = found.startswith("error: stalled")
    remedy = _remedy(stage, communication, address) if is_stall else "fix the error in its log"
    if "(state T)" in found:
        remedy = "kill -CONT its process, or end it"
    return [error("all-reduce", found.removeprefix("error: "), remedy)]


def _name(places: Placement, rank: int) -> str:
    place = places.all[rank]
    return f"rank {rank} (device {place.device_id} of {place.host})"


def _remedy(stage: str, communication: str, address: str) -> str:
    """Return what to do about ranks that got no further than ``stage``."""
    if stage in ("", "started"):
        return "check for a slow file system or a busy host; for more time: --time_limit"
    link = {
        "gloo": "GLOO_SOCKET_IFNAME must name the interface that leads to the other hosts",
        "nccl": "NCCL_DEBUG=INFO shows more; NCCL_SOCKET_IFNAME must name the interface that leads to the other hosts",
        "hccl": "`hccn_tool -i N -link -g` must say UP, and `hccn_tool -i N -ping -g address IP`"
        " reach the others' device_ip",
        "mccl": "MS_TOPO_TIMEOUT and the scheduler's log show more",
    }[communication]
    if stage == "imported":
        return f"check that every host can reach {address}, past firewalls; {link}"
    return link


def _speed(facts: Sequence[Mapping[str, Any]]) -> str:
    """Return the speed of the slowest rank.

    In a ring all-reduce each rank sends and receives 2 (n - 1) / n of the bytes; other algorithms are counted alike.
    """
    first, seconds, ready = (max(float(fact["speed"][key]) for fact in facts) for key in ("first", "seconds", "ready"))
    size, ring = float(facts[0]["speed"]["bytes"]), 2 * (len(facts) - 1) / len(facts)
    rate = f" ({size * ring / seconds / 1e9:.2f} GB/s a rank)" if ring and seconds else ""
    return (
        f"{size / 2**20:.0f} MiB in {seconds * 1e3:.1f} ms{rate}, the first in"
        f" {first * 1e3:.0f} ms, group ready after {ready:.1f} s"
    )


def _check_facts(facts: Sequence[Mapping[str, Any]], places: Placement) -> list[Check]:
    """Return the checks of versions and clocks of several hosts, by the facts of each rank."""
    if len(places.hosts) == 1:
        return []
    checks, ahead = [], dict[str, float]()
    for host in places.hosts:
        theirs, ours = (
            {key: fact[key] for key in fact if key != "speed"}
            for fact in (facts[places.of_host(host)[0].rank], facts[0])
        )
        ahead[host] = theirs.pop("time") - ours.pop("time")
        keys = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]
        if keys:
            first = places.hosts[0]
            found = ", ".join(f"{key} {theirs.get(key)} ({first}: {ours.get(key)})" for key in keys)
            checks.append(warning("versions", f"{host} has {found}", "install the same on every host"))
    furthest = max(ahead, key=lambda host: abs(ahead[host]))
    seconds = ahead[furthest]
    if abs(seconds) > CLOCK_SECONDS:
        found = f"{furthest} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"
        remedy = "logs and file times of the hosts will not agree: start chronyd or ntpd"
        checks.append(warning("clock", f"{found} {places.hosts[0]}", remedy))
    else:
        text = f"within {abs(seconds):.3f} s of {places.hosts[0]}'s (the furthest: {furthest})"
        checks.append(ok("clock", text))
    return [*checks, ok("hosts", f"all {len(places.hosts)} have come")]

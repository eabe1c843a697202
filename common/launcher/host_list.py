"""One run_distribute.sh for every host of a list: its command, and its start over ssh."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from common.cluster.places import RankPlacement
from common.errors import ConfigError
from common.paths import ROOT
from common.processes.addresses import is_ip, may_be_host
from common.processes.heartbeat import start_heartbeat
from common.processes.process_tree import tied

_STOP_CHECK_SECONDS = 0.2
_PASSED_ON = re.compile(
    r"(?!(HCCL_IF_IP|NCCL_HOSTID)$)((TORCH_)?NCCL|HCCL)_\w+|MASTER_PORT|OMP_NUM_THREADS"
    r"|GLOO_SOCKET_IFNAME|PYTORCH_(CUDA_|NPU_)?ALLOC_CONF|TASK_QUEUE_ENABLE|CPU_AFFINITY_CONF"
    r"|ASCEND_LAUNCH_BLOCKING|ASCEND_GLOBAL_LOG_LEVEL|CUDA_DEVICE_MAX_CONNECTIONS"
)
"""Variables that every host gets as they are here. Two of NCCL and HCCL differ between hosts."""


def parse_hosts(text: str, option: str = "--hosts") -> tuple[str, ...]:
    """Parse ``a,b`` or ``user@a,user@b``, with the host of rank 0 first. Raises ConfigError."""
    hosts = tuple(word.strip() for word in text.split(","))
    for host in hosts:
        # ssh would take a leading - for an option
        if host.startswith("-") or not host.isprintable() or not may_be_host(host.rpartition("@")[2]):
            raise ConfigError(
                f"{option} {text!r}: {host!r} is not the name or address of a host; expected such as"
                " 10.0.0.1,10.0.0.2, without ports or slots: the range says how many ranks each host starts"
            )
        if hosts.count(host) > 1:
            raise ConfigError(f"{option} {text}: {host} is there twice; name each host once")
    return hosts


def divide(
    hosts: Sequence[str],
    numbers: Sequence[int],
    *,
    rank_size: int | None,
    table: Sequence[RankPlacement],
    master: str | None,
    port: int,
) -> list[tuple[str, Sequence[int], tuple[str, ...]]]:
    """Return each host with its devices or ranks, and the arguments of run_distribute.sh by which it meets the others.
    That of rank 0 is the first.

    table: the places of a rank table, whose servers are the hosts; empty without one. master: the address of the first
    host for the others, if the list does not have it. Raises ConfigError where the parts do not fit.
    """
    address = master or hosts[0].rpartition("@")[2]
    meet = ("--master", f"[{address}]:{port}" if ":" in address else f"{address}:{port}") if len(hosts) > 1 else ()
    if table:
        if rank_size is None and len(hosts) > 1:
            raise ConfigError(
                f"--hosts with a rank table needs all its ranks and RANK_SIZE: '[0,{len(table)})' MODE {len(table)}"
            )
        return [(host, ranks, meet if master else ()) for host, ranks in _in_table_order(hosts, table)]
    if rank_size is None:
        return [
            (host, numbers, (*meet, "--nnodes", str(len(hosts)), "--node_rank", str(node)))
            for node, host in enumerate(hosts)
        ]
    size, rest = divmod(rank_size, len(hosts))
    if rest or numbers != range(rank_size):
        raise ConfigError(
            f"--hosts names {len(hosts)} hosts for the ranks [{numbers[0]},{numbers[-1] + 1})"
            f" of {rank_size}; give all ranks, '[0,{rank_size})', as many on each host"
        )
    return [(host, range(node * size, (node + 1) * size), meet) for node, host in enumerate(hosts)]


def _in_table_order(hosts: Sequence[str], places: Sequence[RankPlacement]) -> list[tuple[str, range]]:
    """Return each server's host and ranks: by its address, or names in the table's order."""
    servers: dict[str, list[int]] = {}
    for place in places:
        servers.setdefault(place.host, []).append(place.rank)
    bare = {host.rpartition("@")[2]: host for host in hosts}
    named = all(is_ip(name) for name in (*bare, *servers))
    if len(hosts) != len(servers) or (named and set(bare) != set(servers)):
        raise ConfigError(
            f"--hosts {','.join(hosts)}: these are {len(hosts)} hosts, but the rank table has the"
            f" {len(servers)} servers {', '.join(servers)}"
        )
    for server, ranks in servers.items():
        if ranks != list(range(ranks[0], ranks[-1] + 1)):
            raise ConfigError(
                f"the ranks of {server} in the rank table are not a range; make the table again"
                " with tools/merge_hccl.py"
            )
    return [
        (bare[server] if named else hosts[index], range(ranks[0], ranks[-1] + 1))
        for index, (server, ranks) in enumerate(servers.items())
    ]


def host_command(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the command for a shell there, with the folder and settings of this host."""
    variables = {"PYTHON": sys.executable} | {
        name: value for name, value in sorted(environ.items()) if value and _PASSED_ON.fullmatch(name)
    }
    script = str(ROOT / "scripts" / "run_distribute.sh")
    start = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), "bash", script, *words])
    return f"cd {shlex.quote(str(Path.cwd()))} && {start}"


def run_over_ssh(host: str, text: str) -> int:
    """Run a command on a host and return its exit code.

    SIGTERM here becomes Ctrl-C on the terminal there, so that its ranks save. When this process
    dies, ssh dies with it, and the command loses its terminal.
    """
    stops: list[int] = []  # before ssh starts, because its first line may bring a stop
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    start_heartbeat()
    ssh = subprocess.Popen(  # noqa: S603 - the user's own hosts and command
        ["ssh", "-tt", "-o", "BatchMode=yes", host, text],  # noqa: S607 - the user's ssh
        stdin=subprocess.PIPE,
        env={**os.environ, "TERM": "dumb"},  # the terminal there is a log file
        preexec_fn=tied(),
    )
    assert ssh.stdin is not None
    while (code := ssh.poll()) is None:
        time.sleep(_STOP_CHECK_SECONDS)
        while stops:
            stops.pop()
            with suppress(BrokenPipeError):  # ssh has just ended
                os.write(ssh.stdin.fileno(), b"\x03")
    return code if code >= 0 else 128 - code

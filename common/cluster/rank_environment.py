"""What a rank is started with: its variables, its command, and the network interface that leads to
the other hosts.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cluster.environment import Process
from common.cluster.places import Placement, RankPlacement
from common.errors import ConfigError
from common.paths import ROOT
from common.processes.addresses import (
    DEFAULT_PORT,
    LOOPBACK,
    free_port,
    interface_of,
    is_ip,
    own_address,
)
from common.whole_numbers import shortened, whole_number

FOREIGN = (
    "RANK_TABLE_FILE",
    "MS_ROLE",
    "MS_NODE_ID",
    "MS_WORKER_NUM",
    "MS_SCHED_HOST",
    "MS_SCHED_PORT",
    "GROUP_RANK",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
)
"""Variables of an earlier run in the user's shell that would mislead a rank where it is given none
of its own.
"""
RDMA = {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}
"""InfiniBand or RoCE between hosts, and an error in place of slow sockets where there is none. HCCL
has no other way between hosts.
"""
SCHEDULER = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from common.processes.heartbeat import"
    " start_heartbeat; start_heartbeat(); import mindspore.communication;"
    " mindspore.communication.init()",
)
"""MindSpore's process that lets the ranks find each other where there is no rank table. Under
MS_ROLE=MS_SCHED it ends when they do, and as they do with a launcher that dies.
"""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where and how the ranks find each other. table: the rank table's absolute path. own_address:
    of this host, for the others; None where it needs none or none is known. interface: that which
    holds it. scheduler: MindSpore meets through its scheduler. rdma: NCCL takes nothing else.
    """

    address: str = LOOPBACK
    port: int = DEFAULT_PORT
    table: Path | None = None
    own_address: str | None = None
    interface: str | None = None
    scheduler: bool = False
    rdma: bool = False


def make_rendezvous(
    places: Placement,
    *,
    port: int | None,
    table: Path | None,
    backend: str,
    environ: Mapping[str, str],
    host: str | None = None,
    on_cpu: bool = False,
    rdma: bool = False,
) -> Rendezvous:
    """For this host; a plan asks for another ``host`` too, whose interface is not known here unless
    it is this machine's.

    on_cpu: MindSpore reads a rank table on Ascend alone; its processes on CPUs meet through the
    scheduler. port: else $MASTER_PORT, else a free one, or 29500 where several hosts meet. Raises
    ConfigError for a MASTER_PORT that is none.
    """
    several = len(places.hosts) > 1
    if backend == "mindspore" and on_cpu:
        table = None
    port = port or given_port(environ) or (DEFAULT_PORT if several else free_port())
    own = None
    if several:
        own = (
            own_address(places.own_host, (places.master, *places.hosts))
            if host is None
            else host
            if is_ip(host)
            else None
        )
    interface = interface_of(own) if own else None
    scheduler = backend == "mindspore" and table is None and places.world_size > 1
    return Rendezvous(
        address=places.master,
        port=port,
        table=table,
        own_address=own,
        interface=interface,
        scheduler=scheduler,
        rdma=rdma,
    )


def rank_variables(
    place: RankPlacement,
    places: Placement,
    rendezvous: Rendezvous,
    *,
    cores: int | None,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """For MindSpore and for torch, whichever the config names. cores: how many the rank may use;
    None of a host that is not this.

    What only tunes the network or threads is left as the user set it in ``environ``.
    """
    several = len(places.hosts) > 1
    world, local_world = str(places.world_size), str(len(places.of_host(place.host)))
    found = {"RANK_ID": str(place.rank), "DEVICE_ID": str(place.device_id), "RANK_SIZE": world}
    if rendezvous.table is not None:
        found["RANK_TABLE_FILE"] = str(rendezvous.table)
    if rendezvous.scheduler:
        found |= {
            "MS_ROLE": "MS_WORKER",
            "MS_NODE_ID": str(place.rank),
            **_scheduler_address(places, rendezvous),
        }
    found |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": local_world,
        "WORLD_SIZE": world,
    }
    found |= {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)}
    if several and rendezvous.rdma:
        found |= RDMA
    tuning = {"HCCL_CONNECT_TIMEOUT": "1800"}
    if cores is not None:
        tuning["OMP_NUM_THREADS"] = str(max(1, cores))
    if not several:
        tuning |= _network("lo")  # closed to other hosts
    if rendezvous.own_address and is_ip(rendezvous.own_address):
        tuning["HCCL_IF_IP"] = rendezvous.own_address
    if rendezvous.interface:
        tuning |= _network(rendezvous.interface)
    return found | {name: environ.get(name) or value for name, value in tuning.items()}


def scheduler_variables(places: Placement, rendezvous: Rendezvous) -> dict[str, str]:
    """Of MindSpore's scheduler, as msrun sets them."""
    return {
        "RANK_ID": "0",
        "RANK_SIZE": str(places.world_size),
        "MS_ROLE": "MS_SCHED",
        **_scheduler_address(places, rendezvous),
    }


def _scheduler_address(places: Placement, rendezvous: Rendezvous) -> dict[str, str]:
    return {
        "MS_WORKER_NUM": str(places.world_size),
        "MS_SCHED_HOST": rendezvous.address,
        "MS_SCHED_PORT": str(rendezvous.port),
    }


def rank_command(config: Path, mode: str, overrides: Sequence[str]) -> tuple[str, ...]:
    return (
        sys.executable,
        str(ROOT / "run_gpt2.py"),
        "--config",
        str(config),
        "--run_mode",
        mode,
        *overrides,
    )


def shell_text(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """A command that a shell takes as it is: a variable a line, then the command."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " \\\n".join([*lines, shlex.join(command)]) + "\n"


def given_port(environ: Mapping[str, str]) -> int | None:
    """MASTER_PORT, where it is set. Raises ConfigError."""
    text = environ.get("MASTER_PORT")
    return parse_port(text, "environment: MASTER_PORT") if text else None


def parse_port(text: str, where: str) -> int:
    """Return the port. The one above it is taken too, by the hosts' launchers. Raises
    ConfigError.
    """
    port = whole_number(text)
    if port is None or not 0 < port < 65535:
        raise ConfigError(
            f"{where}: {shortened(text)!r} is no port; expected 1024 to 65534, and the one above it"
            " free too"
        )
    return port


def parse_master(text: str | None) -> tuple[str | None, int | None]:
    """Host and port of ``IP:PORT`` or ``[IPv6]:PORT``; of nothing, nothing. Raises ConfigError."""
    if text is None:
        return None, None
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host:
        raise ConfigError(f"--master {text!r}: expected IP:PORT, such as 10.0.0.1:29500")
    return host, parse_port(port, "--master")


def network_of_one_host(process: Process) -> Mapping[str, str]:
    """Return variables by which gloo and NCCL keep to the loopback interface.

    None where the run has several hosts.
    """
    if process.local_world_size < process.world_size:
        return {}
    interface = interface_of(LOOPBACK)
    return {} if interface is None else _network(interface)


def _network(interface: str) -> dict[str, str]:
    # =: this name, no prefix
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}

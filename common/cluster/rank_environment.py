"""Variables and command of a rank, and the network interface to the other hosts."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.cluster.environment import Process
from common.cluster.places import Placement, RankPlacement
from common.errors import ConfigError
from common.paths import ROOT
from common.processes.addresses import DEFAULT_PORT, LOOPBACK, free_port, interface_of, is_ip, may_be_host, own_address
from common.whole_numbers import whole_number

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
"""Variables of an earlier run in the user's shell that would mislead a rank; removed unless set again."""
RDMA = {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}
"""Settings for InfiniBand or RoCE between hosts, with an error instead of slow sockets."""
SCHEDULER = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from common.processes.heartbeat import start_heartbeat;"
    " start_heartbeat(); import mindspore.communication; mindspore.communication.init()",
)
"""Command of MindSpore's scheduler, by which ranks find each other without a rank table.

Under MS_ROLE=MS_SCHED it ends when they do, and also when its launcher dies.
"""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Information by which the ranks find each other.

    table: absolute path of the rank table. own_address: of this host, for the others; None if not needed or unknown.
    interface: the one that has it. scheduler: whether MindSpore uses its scheduler. rdma: whether NCCL must use RDMA.
    """

    port: int
    table: Path | None
    own_address: str | None
    interface: str | None
    scheduler: bool
    rdma: bool


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
    """Return the rendezvous for this host, or for another ``host`` in a plan.

    The interface of another host is unknown. on_cpu: MindSpore reads a rank table only on Ascend;
    its processes on CPUs meet through the scheduler. port: overrides $MASTER_PORT; the default is a
    free one, or 29500 for several hosts. Raises ConfigError for an invalid MASTER_PORT.
    """
    several = len(places.hosts) > 1
    if backend == "mindspore" and on_cpu:
        table = None
    own = host if several and host is not None and is_ip(host) else None
    if several and host is None:
        own = own_address(places.own_host, (places.master, *places.hosts))
    return Rendezvous(
        port=port or given_port(environ) or (DEFAULT_PORT if several else free_port()),
        table=table,
        own_address=own,
        interface=interface_of(own) if own else None,
        scheduler=backend == "mindspore" and table is None and places.world_size > 1,
        rdma=rdma,
    )


def rank_variables(
    place: RankPlacement, places: Placement, rendezvous: Rendezvous, *, cores: int | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a rank, for MindSpore and torch alike.

    cores: number that the rank may use; None for another host. Variables that only tune the network
    or threads stay as the user set them in ``environ``.
    """
    several = len(places.hosts) > 1
    world, local_world = str(places.world_size), str(len(places.of_host(place.host)))
    found = {"RANK_ID": str(place.rank), "DEVICE_ID": str(place.device_id), "RANK_SIZE": world}
    if rendezvous.table is not None:
        found["RANK_TABLE_FILE"] = str(rendezvous.table)
    if rendezvous.scheduler:
        meeting = {**scheduler_variables(places, rendezvous), "RANK_ID": str(place.rank)}
        found |= {**meeting, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(place.rank)}
    found |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": local_world,
        "WORLD_SIZE": world,
        "MASTER_ADDR": places.master,
        "MASTER_PORT": str(rendezvous.port),
    }
    if several and rendezvous.rdma:
        found |= RDMA
    tuning = {"HCCL_CONNECT_TIMEOUT": "1800"}
    if cores is not None:
        threads = str(max(1, cores))
        # without the second, each rank starts as many compilers as the host has cores
        tuning |= {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    if not several:
        tuning |= _network("lo")  # closed to other hosts
    if rendezvous.own_address and is_ip(rendezvous.own_address):
        tuning["HCCL_IF_IP"] = rendezvous.own_address
    if rendezvous.interface:
        tuning |= _network(rendezvous.interface)
    return found | {name: environ.get(name) or value for name, value in tuning.items()}


def hccl_seconds(limit: float) -> str:
    """Return HCCL_EXEC_TIMEOUT for a limit in seconds, where HCCL's own is 1836.

    A first Ascend takes multiples of 68, at most 17340 (CANN's reference of variables, envref_07_0078).
    """
    return str(68 * min(math.ceil(limit / 68), 255))


def scheduler_variables(places: Placement, rendezvous: Rendezvous) -> dict[str, str]:
    """Return the variables of MindSpore's scheduler, as msrun sets them."""
    return {
        "RANK_ID": "0",
        "RANK_SIZE": str(places.world_size),
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": str(places.world_size),
        "MS_SCHED_HOST": places.master,
        "MS_SCHED_PORT": str(rendezvous.port),
    }


def rank_command(config: Path, mode: str, overrides: Sequence[str], *, program: Path | None = None) -> tuple[str, ...]:
    """Return the command of a rank. program: a script that takes the arguments of run_gpt2.py."""
    return (
        sys.executable,
        str(program or ROOT / "run_gpt2.py"),
        "--config",
        str(config),
        "--run_mode",
        mode,
        *overrides,
    )


def shell_text(variables: Mapping[str, str], command: Sequence[str]) -> str:
    """Return a command to paste into a shell: one variable per line, then the command."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " \\\n".join([*lines, shlex.join(command)]) + "\n"


def given_port(environ: Mapping[str, str]) -> int | None:
    """Return MASTER_PORT if it is set. Raises ConfigError."""
    text = environ.get("MASTER_PORT")
    return parse_port(text, "environment: MASTER_PORT") if text else None


def parse_port(text: str, where: str) -> int:
    """Return the port. The launchers of the hosts use the one above it too. Raises ConfigError."""
    port = whole_number(text)
    if port is None or not 0 < port < 65535:
        raise ConfigError(
            f"{where}: {text!r} is not a usable port; expected 1024 to 65534, with the next port free too"
        )
    return port


def parse_master(text: str | None) -> tuple[str | None, int | None]:
    """Split ``IP:PORT`` or ``[IPv6]:PORT``; (None, None) for None. Raises ConfigError."""
    if text is None:
        return None, None
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not may_be_host(host):
        raise ConfigError(f"--master {text!r}: expected IP:PORT, such as 10.0.0.1:29500")
    return host, parse_port(port, "--master")


def network_of(process: Process) -> Mapping[str, str]:
    """Return variables that keep gloo and NCCL of one host on the loopback interface.

    With several hosts gloo would take the address of the host's name, which may be a loopback one.
    It gets the interface from which this host reaches rank 0's; NCCL finds its own.
    """
    alone = process.local_world_size == process.world_size
    own = LOOPBACK if alone else own_address("", filter(None, [process.master]))
    interface = interface_of(own) if own else None
    if interface is None:
        return {}
    return _network(interface) if alone else {"GLOO_SOCKET_IFNAME": interface}


def _network(interface: str) -> dict[str, str]:
    # = means this exact name, not a prefix
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}

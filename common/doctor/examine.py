"""The doctor's checks, in the order of its report: ``examine``. A new check is one entry there."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from common.cluster import hccn
from common.cluster.places import Placement, find_places, parse_range, place_hosts, places_of_table
from common.cluster.rank_environment import given_port, make_rendezvous, parse_master
from common.cluster.rank_table import RankTable, table_warnings
from common.cluster.rank_table_files import read_table
from common.device import processor_name
from common.doctor import machine, software
from common.doctor.allreduce import FACTS, try_all_reduce
from common.doctor.report import Check, error, exit_code, ok, warning
from common.errors import ConfigError, DataError
from common.flags import at_least, flag
from common.launcher.jobs import make_children, make_hosts
from common.launcher.supervisor import Job
from common.paths import TOOLS
from common.processes.addresses import DEFAULT_PORT, is_own
from common.whole_numbers import MAX_RANKS, whole_number

IMPORT_SECONDS = 120.0
LIBRARIES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Communication library of each kind of device."""


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """Options of tools/doctor.py. Raises ConfigError."""

    rank_table: Path | None = flag("FILE: check this table, and all-reduce over its ranks")
    ranks: str | None = flag(
        "N: all-reduce over N ranks of this host, devices 0 to N-1; or over the devices '[4,8)';"
        " with --master, of each host (default then: its devices, 2 on a CPU)"
    )
    master: str | None = flag("IP:PORT: address of host 0 and a port, where the hosts meet without a rank table")
    nnodes: int | None = flag("N: number of hosts", type=at_least(1))
    node_rank: int | None = flag("K: number of this host, from 0; host 0 has rank 0", type=at_least(0))
    backend: str | None = flag(
        "framework to check (default: torch where it is installed, else mindspore)", choices=sorted(software.BACKENDS)
    )
    device: str = flag(
        "kind of device that the ranks compute on (default: auto, what is there)",
        default="auto",
        choices=("auto", *LIBRARIES),
    )
    time_limit: float = flag(
        "S: seconds that the other hosts, the imports, and each stage of the all-reduce may take (default: 60)",
        default=60.0,
    )
    output_dir: Path = flag(
        "DIR: folder that runs will write to, whose disk is checked (default: the current one)", default=Path()
    )
    json: bool = flag("print the findings as JSON, for programs")
    explain: str | None = flag(
        "LOG|CODE: explain the known errors in a log or a run folder, or one code or message; no checks"
    )
    language: Literal["en", "zh"] | None = flag("language of the explanation (default: that of the locale)")

    def __post_init__(self) -> None:
        if self.rank_table and (self.ranks or self.master or self.nnodes):
            raise ConfigError("--rank_table names the ranks and hosts; leave out --ranks, --master and --nnodes")
        if not 0 < self.time_limit <= 86400:
            raise ConfigError(f"--time_limit {self.time_limit:g}: expected seconds, above 0")
        if (self.nnodes is None) != (self.master is None):
            raise ConfigError("--master IP:PORT and --nnodes N belong together")
        _ = self.devices, parse_master(self.master)  # refused before the checks begin

    @property
    def devices(self) -> range | None:
        """The devices that ``--ranks`` names: ``8`` or ``[4,8)``."""
        if not self.ranks:
            return None
        found = whole_number(self.ranks)
        devices = parse_range(self.ranks, "--ranks", "") if found is None else range(found)
        if not 0 < len(devices) <= MAX_RANKS:
            raise ConfigError(f"--ranks {self.ranks}: expected 1 or more, {MAX_RANKS} at most")
        return devices


class Facts:
    """Facts about this machine and the run."""

    def __init__(self, asked: DoctorRequest) -> None:
        self.asked = asked
        address, port = parse_master(asked.master)
        self.port = port or given_port(os.environ)
        self.versions = software.installed_versions()
        torch_is_first = self.versions["torch"] or not self.versions["mindspore"]
        self.backend = asked.backend or ("torch" if torch_is_first else "mindspore")
        self.npus = hccn.npu_numbers()
        needs_cann = bool(self.npus or self.versions["torch_npu"] or asked.device == "npu")
        self.cann = software.check_cann(os.environ, needed=needs_cann)
        wanted = software.BACKENDS[asked.backend] if asked.backend else software.IMPORTED
        names = [name for name in wanted if self.versions[name]]
        if "mindspore" in names and self.npus:
            names.append("hccl")  # CANN's, by which MindSpore's ranks meet
        self.imports = software.check_imports(names, IMPORT_SECONDS)
        self.devices = machine.check_devices(asked=asked.device)
        self.usable = {"npu": self.npus}
        """Devices that the backend can use, by kind."""
        if self.backend == "torch":
            self.usable = {kind: list(range(number)) for kind, number in self.imports[1].items()}
        found = next((kind for kind in ("npu", "cuda") if self.usable.get(kind)), "cpu")
        self.device = found if asked.device == "auto" else asked.device
        """Kind of device on which the ranks compute."""
        self.table: RankTable | None = None
        self.places: Placement | None = None
        """Ranks to try, and which of their hosts this is; None without any."""
        self.of_ranks: list[Check] = []
        """Checks of the rank table and of the ranks' places."""
        self.digest: str | None = None
        """SHA-256 of the rank table."""
        try:
            if (path := asked.rank_table) is not None:
                self.table = table = read_table(path)
                self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
                servers = f"{len(table.server_list)} servers" if len(table.server_list) > 1 else "1 server"
                found = f"{path}: version {table.version}, {table.world_size} ranks on {servers}, sha256 {self.digest}"
                self.of_ranks = [ok("rank table", found)]
                self.of_ranks += [warning("rank table", text, "") for text in table_warnings(table)]
                self.places = _team_of_table(table, asked)
            elif asked.devices is not None or address is not None:
                devices = asked.devices or range(len(self.usable.get(self.device, ())) or 2)
                self.places = find_places(devices, master=address, nodes=asked.nnodes, node_rank=asked.node_rank)
        except (DataError, ConfigError) as reason:
            self.of_ranks.append(error("rank table" if isinstance(reason, DataError) else "ranks", str(reason), ""))


def check_usable_devices(facts: Facts) -> list[Check]:
    """Check whether the backend can use the devices of this machine."""
    backend, asked, seen = facts.backend, facts.asked.device, facts.devices[1]
    if facts.device == "cpu" and seen and asked == "auto":
        found = f"{backend} counts none of {seen} devices here, so runs compute on the CPU"
        return [warning("device", found, f"install the {backend} that is built for them")]
    has_backend = seen and facts.versions[backend]
    if asked in ("npu", "cuda") and has_backend and not facts.usable.get(asked):
        found = f"{backend} counts no {asked} device, and this machine shows {seen} devices"
        remedy = f"install the {backend} that is built for them; look at the errors above"
        return [error("device", found, remedy)]
    return []


def check_network(facts: Facts) -> list[Check]:
    """Check the ports of this host and its names."""
    places = facts.places
    several = places is not None and len(places.hosts) > 1
    first = places is None or places.own_host == places.hosts[0]
    port, npu = facts.port or DEFAULT_PORT, bool(facts.npus)
    address = places.own_host if places is not None and (facts.table or (several and first)) else None
    return [
        *machine.check_ports(port, os.environ, first_host=first, npu=npu, several_hosts=several),
        *machine.check_names(address, several_hosts=several),
    ]


def check_all_reduce(facts: Facts) -> list[Check]:
    """Run a real all-reduce, if ranks were asked for and can be tried."""
    places, backend, device = facts.places, facts.backend, facts.device
    if places is None:
        return []
    broken = exit_code(check for check in facts.imports[0] if check.name == f"import {backend}")
    if broken or not facts.versions[backend]:
        return [error("all-reduce", f"not tried: {backend} does not import", "fix that first")]
    usable = facts.usable.get(device, [])
    lacking = [place.device_id for place in places.own if device != "cpu" and place.device_id not in usable]
    if lacking:
        numbers = ", ".join(map(str, lacking))
        found = f"not tried: {backend} counts {len(usable)} {device} devices, none of number {numbers}"
        return [error("all-reduce", found, "fewer --ranks, or --device cpu")]
    return try_ranks(facts, places)


def examine(asked: DoctorRequest) -> list[Check]:
    """Run all checks. Raises ConfigError for a MASTER_PORT that is not a port."""
    facts = Facts(asked)
    return [
        ok("system", f"{platform.platform()}, {processor_name()}, {os.cpu_count()} cores"),
        *software.check_versions(facts.versions, software.wanted_ranges(), asked.backend),
        *software.check_device_package(facts.versions, facts.backend, asked.device),
        facts.cann[0],
        *software.check_pairs(facts.versions, os.environ, facts.cann[1]),
        *facts.imports[0],
        *facts.devices[0],
        *check_usable_devices(facts),
        *facts.of_ranks,
        *check_network(facts),
        *machine.check_variables(os.environ),
        *machine.check_storage(asked.output_dir),
        machine.check_memory(),
        machine.check_limits(),
        *check_all_reduce(facts),
    ]


def _team_of_table(table: RankTable, asked: DoctorRequest) -> Placement:
    """Return the ranks of a table, and which of its hosts this is. Raises ConfigError."""
    if table.version == "2.0":
        raise ConfigError(
            f"{asked.rank_table}: a rank table of version 2.0 names no hosts; give --master, --nnodes and --node_rank"
        )
    places, node_rank = places_of_table(table), asked.node_rank
    hosts = list(dict.fromkeys(place.host for place in places))
    last = len(hosts) - 1
    own = [host for host in hosts if is_own(host)]
    if node_rank is not None:
        if not 0 <= node_rank <= last:
            raise ConfigError(f"--node_rank {node_rank}: the rank table has servers 0 to {last}")
        own = [hosts[node_rank]]
    if len(hosts) == 1:
        own = hosts
    if len(own) != 1:
        which = f"{', '.join(own)} are all" if own else f"none of {', '.join(hosts)} is"
        raise ConfigError(f"{which} this machine's; name the server of the rank table with --node_rank 0 to {last}")
    return place_hosts(places, own[0])


def try_ranks(facts: Facts, places: Placement) -> list[Check]:
    """Return the checks of a trial; the all-reduce is the last one."""
    asked, backend, device, limit = facts.asked, facts.backend, facts.device, facts.asked.time_limit
    table = asked.rank_table.resolve() if asked.rank_table is not None and device == "npu" else None
    rendezvous = make_rendezvous(places, port=facts.port, table=table, backend=backend, environ=os.environ)
    # libraries with a shorter timeout would fail on the waiting ranks, and hide the missing one
    patience = str(int(limit) + 60)
    program = str(TOOLS / "allreduce_check.py")
    facts_of_host = {
        "python": platform.python_version(),
        **{name: version for name, version in facts.versions.items() if version},
        "CANN": facts.cann[1],
        "backend": f"{backend} on {device}",
        "rank table": facts.digest,
    }
    variables = {
        FACTS: json.dumps(facts_of_host),
        "HCCL_CONNECT_TIMEOUT": str(max(1, round(limit))),  # the launchers wait for each other
    }
    children = make_children(
        places, rendezvous, (sys.executable, program, backend, device, patience), environ=os.environ, pinned=False
    )
    folder = Path(tempfile.mkdtemp(prefix="gpt2_doctor_"))
    job = Job(
        children=tuple(replace(child, environment={**child.environment, **variables}) for child in children),
        log_folder=folder,
        stall_limit=limit,
        hosts=make_hosts(places, rendezvous),
    )
    communication = "mccl" if (backend, device) == ("mindspore", "cpu") else LIBRARIES[device]
    logs_are_wanted = False
    try:
        checks = try_all_reduce(job, places, communication, f"{places.master}:{rendezvous.port}")
        logs_are_wanted = bool(exit_code(checks))
    finally:
        if not logs_are_wanted:
            shutil.rmtree(folder, ignore_errors=True)
    return checks

"""Check this machine before a run: versions, drivers, devices, ports, names, disk, limits; with ranks, a real all-reduce over them.

    python tools/doctor.py                                                    this machine
    python tools/doctor.py --ranks 8                                          and an all-reduce over its devices 0 to 7
    python tools/doctor.py --rank_table hccl_4s_32p.json                      on every server of the table, at about the same time
    python tools/doctor.py --master 10.0.0.1:29500 --nnodes 2 --node_rank 0   the same without a table

Exit code 0: no errors; 2: errors, or bad arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.interrupts import end_at_interrupts, run_script

if __name__ == "__main__":
    end_at_interrupts()

from common import whole_numbers as whole
from common.cluster import RankTable, read_table, remarks
from common.cluster.places import HERE, Placement, find_places, parse_range, places_of_table
from common.cluster.rank_environment import (
    DEFAULT_PORT,
    given_port,
    is_own,
    make_rendezvous,
    parse_master,
    rank_variables,
    scheduler_variables,
)
from common.doctor import machine, multi_host as together, software
from common.doctor.allreduce import AllReduceTrial, TrialRanks
from common.doctor.report import Check, as_json, as_table, error, exit_code, ok, warning
from common.errors import ConfigError, DataError, GPT2Error
from common.whole_numbers import MOST_RANKS, whole_number

IMPORT_SECONDS = 120.0
LIBRARIES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rank_table", type=Path, metavar="FILE", help="check this table, and all-reduce over its ranks")
    parser.add_argument(
        "--ranks",
        metavar="N",
        help="all-reduce over N ranks of this host, devices 0 to N-1; or over the devices '[4,8)'; with --master, of each host "
        "(default then: its devices, 2 on a CPU)",
    )
    parser.add_argument("--master", metavar="IP:PORT", help="where the hosts meet, without a rank table: an address of host 0")
    parser.add_argument("--nnodes", type=whole.argument(1), metavar="N", help="how many hosts")
    parser.add_argument("--node_rank", type=whole.argument(), metavar="K", help="which of them this is; host 0 has rank 0")
    parser.add_argument("--backend", choices=sorted(software.BACKENDS), help="(default: torch where it is installed)")
    parser.add_argument("--device", choices=("auto", *LIBRARIES), default="auto", help="what the ranks compute on (default: what is there)")
    parser.add_argument("--time_limit", type=float, default=60.0, metavar="S", help="of the all-reduce, imports too (default: 60 s)")
    parser.add_argument("--output_dir", type=Path, default=Path(), metavar="DIR", help="where runs will write (default: here)")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(words)
    if arguments.rank_table and (arguments.ranks or arguments.master or arguments.nnodes):
        parser.error("--rank_table names the ranks and hosts; leave out --ranks, --master and --nnodes")
    if not 0 < arguments.time_limit <= 86400:
        parser.error(f"--time_limit {arguments.time_limit:g}: expected seconds, above 0")
    if (arguments.nnodes is None) != (arguments.master is None):
        parser.error("--master IP:PORT and --nnodes N belong together")
    try:
        arguments.devices = device_range(arguments.ranks) if arguments.ranks else None
        arguments.address, arguments.port = parse_master(arguments.master)
    except ConfigError as reason:
        parser.error(str(reason))
    return arguments


def device_range(words: str) -> range:
    """The devices that ``--ranks`` names: ``8`` or ``[4,8)``. Raises ConfigError."""
    found = whole_number(words)
    devices = parse_range(words) if found is None else range(found)
    if not 0 < len(devices) <= MOST_RANKS:
        raise ConfigError(f"--ranks {words}: expected 1 or more, {MOST_RANKS} at most")
    return devices


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the children are ended on the way out
    try:
        checks = examine(arguments)
    except GPT2Error as reason:  # a MASTER_PORT that is none
        print(f"error: {reason}", file=sys.stderr)
        return reason.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    sys.stdout.write(as_json(checks) if arguments.json else as_table(checks, colour=sys.stdout.isatty()))
    return exit_code(checks)


def examine(arguments: argparse.Namespace) -> list[Check]:
    versions = software.installed_versions()
    backend = arguments.backend or ("torch" if versions["torch"] or not versions["mindspore"] else "mindspore")
    npus = machine.npu_numbers()
    checks = [machine.check_system(), *software.check_versions(versions, software.wanted_ranges(ROOT), arguments.backend)]
    checks += software.check_device_package(versions, backend, arguments.device)
    cann_check, cann = software.check_cann(os.environ, needed=bool(npus or versions["torch_npu"] or arguments.device == "npu"))
    checks += [cann_check, *software.check_pairs(versions, os.environ, cann)]
    wanted = software.BACKENDS[arguments.backend] if arguments.backend else software.IMPORTED
    imports, counted = software.check_imports([name for name in wanted if versions[name]], IMPORT_SECONDS)
    devices, seen = machine.check_devices(asked=arguments.device)
    checks += [*imports, *devices]
    broken = exit_code([check for check in imports if check.name == f"import {backend}"])
    usable = {kind: list(range(number)) for kind, number in counted.items()} if backend == "torch" else {"npu": npus}
    device = arguments.device if arguments.device != "auto" else next((kind for kind in ("npu", "cuda") if usable.get(kind)), "cpu")
    if device == "cpu" and seen and arguments.device == "auto":
        found = f"{backend} counts none of {seen} devices here, so runs compute on the CPU"
        checks.append(warning("device", found, f"install the {backend} that is built for them"))
    if arguments.device in ("npu", "cuda") and seen and versions[backend] and not usable.get(device):
        found = f"{backend} counts no {device} device, and this machine shows {seen} devices"
        checks.append(error("device", found, f"install the {backend} that is built for them; look at the errors above"))
    table_checks, table = read_rank_table(arguments.rank_table)
    checks += table_checks
    places = None
    try:
        places = find_team(arguments, table, default=len(usable.get(device, ())) or 2)
    except ConfigError as reason:
        checks.append(error("ranks", str(reason), ""))
    several = places is not None and len(places.hosts) > 1
    first = places is None or places.own_host == places.hosts[0]
    port = arguments.port or given_port(os.environ)
    checks += machine.check_ports(port or DEFAULT_PORT, os.environ, first_host=first, npu=bool(npus), several_hosts=several)
    named = places.own_host if places is not None and (table is not None or (several and first)) else None
    checks += [*machine.check_names(named, several_hosts=several), *machine.check_variables(os.environ)]
    checks += [*machine.check_storage(arguments.output_dir), machine.check_memory(), machine.check_limits()]
    if places is None:
        return checks
    if broken or not versions[backend]:
        return [*checks, error("all-reduce", f"not tried: {backend} does not import", "mend that first")]
    lacking = [place.device_id for place in places.own if device != "cpu" and place.device_id not in usable.get(device, ())]
    if lacking:
        found = f"not tried: {backend} counts {len(usable.get(device, ()))} {device} devices, none of number {', '.join(map(str, lacking))}"
        return [*checks, error("all-reduce", found, "fewer --ranks, or --device cpu")]
    facts = {"python": platform.python_version(), **{name: version for name, version in versions.items() if version}, "CANN": cann}
    return checks + try_ranks(arguments, places, backend, device, port=port, table=table, facts=facts)


def read_rank_table(path: Path | None) -> tuple[list[Check], RankTable | None]:
    if path is None:
        return [], None
    try:
        table = read_table(path)
    except DataError as reason:
        return [error("rank table", str(reason), "")], None
    servers = f"{len(table.servers)} servers" if len(table.servers) > 1 else "1 server"
    found = f"{path}: version {table.version}, {table.world_size} ranks on {servers}, sha256 {sha256(path)}"
    return [ok("rank table", found), *(warning("rank table", remark, "") for remark in remarks(table))], table


def find_team(arguments: argparse.Namespace, table: RankTable | None, *, default: int) -> Placement | None:
    """The ranks to try and which of their hosts this is; None without any. Raises ConfigError."""
    if table is not None and table.version == "2.0":
        raise ConfigError(f"{arguments.rank_table}: a rank table of version 2.0 names no hosts; give --master, --nnodes and --node_rank")
    if table is not None:
        all_places = places_of_table(table)
        hosts = list(dict.fromkeys(place.host for place in all_places))
        own = [host for host in hosts if is_own(host)]
        if arguments.node_rank is not None:
            if not 0 <= arguments.node_rank < len(hosts):
                raise ConfigError(f"--node_rank {arguments.node_rank}: the rank table has servers 0 to {len(hosts) - 1}")
            own = [hosts[arguments.node_rank]]
        if len(hosts) == 1:
            return Placement(all=all_places, own_host=hosts[0], master=HERE)
        if len(own) != 1:
            which = f"{', '.join(own)} are all" if own else f"none of {', '.join(hosts)} is"
            raise ConfigError(f"{which} this machine's; say which server of the rank table this is with --node_rank 0 to {len(hosts) - 1}")
        return Placement(all=all_places, own_host=own[0], master=hosts[0])
    if arguments.devices is None and arguments.address is None:
        return None
    devices = arguments.devices or range(default)
    return find_places(devices, master=arguments.address, nodes=arguments.nnodes, node_rank=arguments.node_rank)


def try_ranks(
    arguments: argparse.Namespace,
    places: Placement,
    backend: str,
    device: str,
    *,
    port: int | None,
    table: RankTable | None,
    facts: Mapping[str, Any],
) -> list[Check]:
    """With the doctors of the other hosts, where there are any: the checks of them all, the all-reduce last."""
    limit = arguments.time_limit
    path = arguments.rank_table.resolve() if table is not None and device == "npu" else None
    meeting = make_rendezvous(places, port=port, table=path, backend=backend, environ=os.environ)
    cores = max(1, (os.cpu_count() or 1) // len(places.own))
    environments = {place.rank: rank_variables(place, places, meeting, cores=cores, environ=os.environ) for place in places.own}
    if meeting.scheduler and places.own_host == places.hosts[0]:
        environments = {-1: scheduler_variables(places, meeting), **environments}
    # Libraries that give up first would fail on the ranks that wait, and hide the one that is missing.
    command = [sys.executable, str(ROOT / "tools" / "allreduce_check.py"), backend, device, str(int(limit) + 60)]
    library = "mccl" if (backend, device) == ("mindspore", "cpu") else LIBRARIES[device]
    trial = AllReduceTrial(
        places=places.all, backend=backend, communication=library, address=f"{meeting.address}:{meeting.port}", limit=limit
    )
    job = {
        "hosts": list(places.hosts),
        "ranks": places.world_size,
        "backend": backend,
        "device": device,
        "rank table": sha256(arguments.rank_table) if table is not None else None,
    }
    folder = Path(tempfile.mkdtemp(prefix="gpt2_doctor_"))
    ranks = TrialRanks(command, environments, folder)
    logs_are_wanted = False
    try:
        checks = together.all_reduce(ranks, trial, places, (meeting.address, meeting.port + 1), job, facts)
        logs_are_wanted = bool(exit_code(checks))
    finally:
        if not logs_are_wanted:
            shutil.rmtree(folder, ignore_errors=True)
    return checks


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    run_script(main)

"""Run on ModelArts: its files, its ranks and their variables, and the start of missing ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.backends import run_backend
from common.cluster.environment import Process, connect_limit, in_modelarts
from common.cluster.places import Placement, RankPlacement, place_hosts, places_of_table
from common.cluster.rank_environment import make_rendezvous, rank_command
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import read_table, wait_for_table, write_table
from common.errors import ConfigError
from common.log import LOG
from common.modelarts.arguments import ModelArtsJob, is_url
from common.modelarts.files import bring_files, bring_output, local_folder, output_copied, send_checkpoint
from common.processes.addresses import LOOPBACK, interface_of, is_own
from common.resolve.derive import resolve_mode
from common.systems.config import ConfigFile, Opened
from common.whole_numbers import MAX_RANKS, whole_number


def run_job(
    file: ConfigFile,
    opened: Opened,
    run_mode: str,
    overrides: Sequence[str],
    job: ModelArtsJob,
    process: Process,
    environ: Mapping[str, str],
) -> None:
    """Run a mode between the copies of its files, or start the ranks that do.

    opened: the configuration of ``file`` with these overrides. MindFormers' YAML may name the URL of the output too.
    """
    os.environ.update(platform_variables(process, environ))
    theirs = (file.tree.get("remote_save_url"), (file.tree.get("aicc_config") or {}).get("obs_path"))
    url = next(filter(is_url, (job.output_url, opened.config.output_dir, *theirs)), None)
    ranks = () if url is None else ranks_to_copy(process, environ, one_process=job.one_process)
    words = [*overrides, *bring_files(opened.config, overrides, url, ranks, environ)]
    config = file.open(words).config
    with output_copied(url, Path(config.output_dir), ranks):
        if must_start_ranks(environ) and not job.one_process:
            start_ranks(file, run_mode, words, environ, url=url)
        else:
            run_backend(run_mode, config, process)


def ranks_to_copy(process: Process, environ: Mapping[str, str], *, one_process: bool) -> tuple[int, ...]:
    """Return the ranks whose output this process copies: those of its host if it is their first.

    one_process: every host runs the same program by itself, and only the first host's output is copied.
    """
    if not must_start_ranks(environ):
        if process.local_rank != 0:
            return ()
        if process.launcher == "rank table" and environ.get("RANK_TABLE_FILE"):
            table = read_table(Path(environ["RANK_TABLE_FILE"]))
            return tuple(device.rank_id for device in table.places()[process.rank][0].device)
        return tuple(range(process.rank, process.rank + process.local_world_size))
    places = find_places(environ)[1]
    if not one_process:
        return tuple(place.rank for place in places.own)
    if places.own_host == places.hosts[0]:
        return (0,)
    LOG.warning(
        f"--use_parallel=False: this host runs the same as {places.hosts[0]}, whose output is copied; ask for one node"
    )
    return ()


def platform_variables(process: Process, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for frameworks that the platform leaves out with one process per card."""
    if not in_modelarts(environ) or process.launcher != "rank table":
        return {}
    found = {"HCCL_CONNECT_TIMEOUT": "1800", "RANK_SIZE": str(process.world_size)}
    if process.device_id is not None:
        found["DEVICE_ID"] = str(process.device_id)
    alone = process.world_size == process.local_world_size
    interface = "lo" if alone else interface_of(environ.get("MA_CURRENT_IP", ""))
    if interface:
        found["GLOO_SOCKET_IFNAME"] = interface
    found = {name: environ.get(name) or value for name, value in found.items()}
    if environ.get("RANK_TABLE_FILE"):
        path = Path(environ["RANK_TABLE_FILE"])
        found["RANK_TABLE_FILE"] = str(_as_version_1(path, read_table(path), environ))
    return found


def must_start_ranks(environ: Mapping[str, str]) -> bool:
    """Tell whether ModelArts started one process, without a rank, for several devices or hosts."""
    if not in_modelarts(environ) or any(
        environ.get(name) for name in ("RANK", "RANK_ID", "MS_ROLE", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    ):
        return False
    return _device_count(environ) > 1 or len(_host_names(environ)) > 1


def start_ranks(
    file: ConfigFile, run_mode: str, overrides: Sequence[str], environ: Mapping[str, str], *, url: str | None = None
) -> None:
    """Start a rank for each device of this host, and wait for all.

    url: of the output. Hosts with disks of their own get the checkpoint of a restart by it.
    Raises SystemExit with their common exit code unless it is 0, and ConfigError and DataError if
    the platform's variables contradict each other.
    """
    from common.launcher.jobs import make_children, make_hosts
    from common.launcher.supervisor import RESTARTABLE, Job, run_attempts

    table_file, places = find_places(environ)
    config = resolve_mode(file.open(overrides).config, run_mode, world_size=places.world_size)
    # names of VC_WORKER_HOSTS resolve inside the job; the server ids of a table may be of another network
    names = _host_names(environ)
    addresses = [
        names[index] if index < len(names) > 1 and host not in names else host
        for index, host in enumerate(places.hosts)
    ]
    most = config.runtime.max_restarts if run_mode in RESTARTABLE else 0

    folder, ranks = Path(config.output_dir), tuple(place.rank for place in places.own)

    def bring_checkpoint(number: int) -> None:
        if url is not None and number and 0 not in ranks:
            bring_output(url, folder, ranks)

    def make_job(number: int) -> Job:
        if url is not None and number and 0 in ranks and len(places.hosts) > 1:
            send_checkpoint(url, folder)
        rendezvous = make_rendezvous(
            places, port=None, table=table_file, backend=config.backend, environ=environ, on_cpu=config.device == "cpu"
        )
        return Job(
            children=make_children(places, rendezvous, rank_command(file.path, run_mode, overrides), environ=environ),
            log_folder=folder,
            stall_limit=config.runtime.stall_limit,
            follow=True,
            hosts=make_hosts(places, rendezvous, addresses),
            return_limit=config.runtime.return_limit,
            when_met=bring_checkpoint,
        )

    if code := run_attempts(make_job, most=most, folder=folder).code:
        sys.exit(code)  # an exception, so that a failed copy of the output does not replace it


def find_places(environ: Mapping[str, str]) -> tuple[Path | None, Placement]:
    """Read the platform's rank table, or place the same devices on each of VC_WORKER_HOSTS."""
    names, index = _host_names(environ), _number(environ, "VC_TASK_INDEX", 0)
    if environ.get("RANK_TABLE_FILE"):
        path = Path(environ["RANK_TABLE_FILE"])
        table = wait_for_table(path, connect_limit(environ))
        if table.version != "2.0":
            path, places = _as_version_1(path, table, environ), places_of_table(table)
            hosts = list(dict.fromkeys(place.host for place in places))
            own = environ.get("MA_CURRENT_IP", "")
            if own not in hosts:
                own = next((host for host in hosts if is_own(host)), hosts[index] if index < len(hosts) else "")
            if not own:
                raise ConfigError(
                    f"environment: neither MA_CURRENT_IP={environ.get('MA_CURRENT_IP', '')} nor"
                    f" VC_TASK_INDEX={index} says which server of"
                    f" RANK_TABLE_FILE={environ['RANK_TABLE_FILE']} this is: it holds"
                    f" {', '.join(hosts)}"
                )
            return path, place_hosts(places, own, names[0] if len(names) > 1 and len(hosts) > 1 else None)
    if index >= len(names):
        raise ConfigError(
            f"environment: VC_TASK_INDEX={index}, but VC_WORKER_HOSTS names {len(names)}: {', '.join(names)}"
        )
    devices = _device_count(environ)
    if devices * len(names) > MAX_RANKS:
        raise ConfigError(
            f"environment: MA_NUM_GPUS={devices} on {len(names)} hosts are more ranks than a job can have, {MAX_RANKS}"
        )
    everyone = tuple(
        RankPlacement(rank=node * devices + device, device_id=device, local_rank=device, host=host)
        for node, host in enumerate(names)
        for device in range(devices)
    )
    return None, Placement(all=everyone, own_host=names[index], master=names[0])


def _host_names(environ: Mapping[str, str]) -> list[str]:
    """Return VC_WORKER_HOSTS in order, checked against MA_NUM_HOSTS; only this host if it is the only one."""
    words = environ.get("VC_WORKER_HOSTS", "").split(",")
    names = [word.strip() for word in words if word.strip()]
    count = _number(environ, "MA_NUM_HOSTS", _number(environ, "VC_WORKER_NUM", len(names) or 1))
    if count <= 1 and len(names) <= 1:
        return [LOOPBACK]
    if len(names) != count:
        raise ConfigError(
            f"environment: MA_NUM_HOSTS={count}, but"
            f" VC_WORKER_HOSTS={environ.get('VC_WORKER_HOSTS', '')} names {len(names)}"
        )
    return names


def _device_count(environ: Mapping[str, str]) -> int:
    """Return the accelerators of this host: MA_NUM_GPUS, which also counts Ascends, else device files."""
    return _number(environ, "MA_NUM_GPUS", 0) or len(list(Path("/dev").glob("davinci[0-9]*"))) or 1


def _as_version_1(path: Path, table: RankTable, environ: Mapping[str, str]) -> Path:
    """Convert a rank table for MindSpore, which reads 1.0, while ModelArts may write version 0."""
    if table.version != "0":
        return path.absolute()
    written = local_folder(f"rank table {path.absolute()}", environ).with_name("hccl_1.0.json")
    write_table(table, written)
    return written


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name) or str(otherwise)
    number = whole_number(text)
    if number is None or number > MAX_RANKS:
        raise ConfigError(f"environment: {name}={text}: expected a whole number, {MAX_RANKS} at most")
    return number

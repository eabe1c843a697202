"""Launch the ranks of this host, or show what would be launched: ``distribute`` and
``standalone``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

from common.accelerators import require_accelerator
from common.cluster import hccn
from common.cluster.places import Placement, find_places, places_of_table
from common.cluster.rank_environment import (
    FOREIGN,
    ROOT,
    given_port,
    make_rendezvous,
    parse_master,
    rank_command,
    shell_text,
)
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import read_table, wait_for_table, write_table
from common.cluster.rank_table_formats import NotReadyError
from common.config.load import load_config
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.launcher.children import make_children, make_hosts
from common.launcher.control import Hosts
from common.launcher.host_list import HostCommand, divide, host_command, parse_hosts
from common.launcher.nodes import settle_nodes
from common.launcher.request import NO_TABLE, LaunchRequest, absolute, is_asked
from common.launcher.supervisor import Job, supervise
from common.launcher.terminal import tell
from common.parallel.resolved_run import ResolvedRun
from common.planner.cluster import describe_cluster, layout_warnings
from common.processes.addresses import DEFAULT_PORT, LOOPBACK, is_own
from common.processes.ranks import ProcessSpec
from common.resolve.derive import resolve_mode
from common.resolve.engine_checks import check_here
from common.run_folder import require_free_folder

TOOL = ROOT / "tools" / "launch.py"
"""Script that starts a launch again, on another host or in the background."""
TABLE_LIMIT = 1800.0


def distribute(request: LaunchRequest) -> int:
    """Plan, show, or start and supervise the ranks of this host. Returns the exit code."""
    _check_options(request)
    starts = request.mode != "plan" and not is_asked("DRY_RUN") and request.hosts is None
    try:
        waits = starts and not is_asked("DETACH")
        table = _read_table(request.table, wait=waits) if request.table else None
    except NotReadyError:
        if not starts:
            raise
        # including the wait
        return _detach(
            _log_folder(request, load_config(request.config, request.overrides)), request
        )
    if request.hosts is not None:
        return _start_hosts(request.hosts, request, table)
    request = settle_nodes(request, meet=waits)
    master, port = parse_master(request.master)
    places = find_places(
        request.numbers,
        rank_size=request.rank_size,
        table=table,
        master=master,
        nodes=request.nnodes,
        node_rank=request.node_rank,
    )
    config = resolve_mode(
        load_config(request.config, request.overrides), request.mode, world_size=places.world_size
    )
    if request.mode == "plan":
        _say(_plan(request, config, places, table))
        return 0
    if config.parallel.strategy == "horovod":
        raise _must_be_horovodrun(request, places)
    children, hosts = _prepare(request, config, places, table, port=port, starts=starts)
    ranks = ", ".join(f"{place.rank} on device {place.device_id}" for place in places.own)
    line = f"ranks of {places.own_host}: {ranks}; of {places.world_size} in all"
    if starts:
        _refuse_second_run(config, request.mode, first_host=places.own[0].rank == 0)
        tell(line)
    else:
        _say(f"# {line}\n")
    return _run(_job(request, config, children, hosts), request)


def standalone(request: LaunchRequest, plan: Callable[[list[str]], int]) -> int:
    """Show, or start and supervise, one process on one device. Returns the exit code.

    plan: ``run_gpt2.main`` for a plan, which needs no process of its own.
    """
    command = rank_command(request.config, request.mode, request.overrides)
    config = resolve_mode(
        load_config(request.config, request.overrides), request.mode, world_size=1
    )
    if request.mode == "plan":
        return plan(list(command[2:]))  # an additional process would outlive a killed launcher
    places = find_places(request.numbers)
    rendezvous = make_rendezvous(
        places, port=None, table=None, backend=config.backend, environ=os.environ
    )
    if not is_asked("DRY_RUN"):
        _refuse_second_run(config, request.mode, first_host=True)
    child = make_children(
        places, rendezvous, command, environ=os.environ, pinned=not request.no_pinning
    )[0]
    return _run(_job(request, config, (replace(child, folder="mf_standalone"),)), request)


def _check_options(request: LaunchRequest) -> None:
    if request.ssh and request.hosts is None:
        raise ConfigError("--ssh needs --hosts: the names of the hosts")
    for name in ("all_ranks", "accelerator"):
        if getattr(request, name) and request.mode != "plan":
            raise ConfigError(f"--{name} is for the mode plan, not {request.mode}; leave it out")


def _read_table(path: Path, *, wait: bool) -> RankTable:
    """Read a rank table, which a platform may still be filling."""
    try:
        return read_table(path)
    except NotReadyError as error:
        if not wait:
            raise
        filling = "initializing" in path.read_text(encoding="utf-8", errors="replace")
        limit = TABLE_LIMIT if filling else 10.0
        tell(f"{error}; waiting up to {limit:g} s", error=True)
        return wait_for_table(path, limit)


def _plan(
    request: LaunchRequest, config: ResolvedRun, places: Placement, table: RankTable | None
) -> str:
    return describe_cluster(
        config,
        places,
        config_path=request.config,
        overrides=request.overrides,
        table=(request.table, table) if request.table and table else None,
        all_ranks=request.all_ranks,
        environ=os.environ,
        device=require_accelerator(request.accelerator) if request.accelerator else None,
    )


def _prepare(
    request: LaunchRequest,
    config: ResolvedRun,
    places: Placement,
    table: RankTable | None,
    *,
    port: int | None,
    starts: bool,
) -> tuple[tuple[ProcessSpec, ...], Hosts | None]:
    """Return the processes of this host, and the hosts; warn of settings that are probably
    unintended.
    """
    needs_ascend = (
        starts and table is not None and (config.backend, config.device) == ("mindspore", "auto")
    )
    if needs_ascend and not hccn.npu_numbers():
        text = "this machine shows no Ascend (/dev/davinciN), for which the rank table is"
        tell(f"warning: device=auto chose cpu: {text}", error=True)
    # a run that is only shown may be for other machines
    kind = check_here(config) if starts else config.device
    table_path = request.table
    if table is not None and table.version == "0":
        folder = _log_folder(request, config)
        table_path = folder / "rank_table.json"  # MindSpore does not read version 0
        if starts:
            folder.mkdir(parents=True, exist_ok=True)
            write_table(table, table_path)
    _warn(places, config, table)
    rendezvous = make_rendezvous(
        places,
        port=port,
        table=table_path,
        backend=config.backend,
        environ=os.environ,
        on_cpu=kind == "cpu",
        rdma=request.use_rdma,
    )
    command = rank_command(request.config, request.mode, request.overrides, program=request.program)
    children = make_children(
        places, rendezvous, command, environ=os.environ, pinned=not request.no_pinning
    )
    if config.logging.style == "fleetx":  # names of Paddle's launcher
        children = tuple(
            child if child.name else replace(child, log_link=f"workerlog.{child.rank}")
            for child in children
        )
    return children, make_hosts(places, rendezvous)


def _warn(places: Placement, config: ResolvedRun, table: RankTable | None) -> None:
    found = layout_warnings(places, config.topology)
    if table is not None and table.version != "2.0" and not is_own(places.own_host):
        found.append(
            f"{places.own_host} is not an address of this machine: is this the range of another"
            " one, or the table of another cluster?"
        )
    if "RANK_TABLE_FILE" in os.environ and table is None:
        given = os.environ["RANK_TABLE_FILE"]
        found.append(
            f"RANK_TABLE_FILE={given} of your environment is not used: the first argument is none"
        )
    for text in found:
        tell(f"warning: {text}", error=True)


def _must_be_horovodrun(request: LaunchRequest, places: Placement) -> ConfigError:
    """Return the error for a run that horovodrun has to start, with the command for it."""
    names = request.node_ips or [
        "localhost" if host == LOOPBACK else host.replace("node ", "HOST") for host in places.hosts
    ]
    sizes = [len(places.of_host(host)) for host in places.hosts]
    hosts = ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))
    command = rank_command(request.config, request.mode, request.overrides)
    words = ["horovodrun", "-np", str(places.world_size), "-H", hosts, *command]
    return ConfigError(
        "parallel.strategy=horovod: Horovod connects only ranks that horovodrun or mpirun has"
        f" started; start them with: {shlex.join(words)}"
    )


def _refuse_second_run(config: ResolvedRun, mode: str, *, first_host: bool) -> None:
    """Reject a second run in one folder, before anything is written. Raises ConfigError.

    Only the host of rank 0 checks, since other hosts would see the hold of their own run.
    """
    if first_host and mode in ("train", "finetune"):
        require_free_folder(Path(config.output_dir))


def _log_folder(request: LaunchRequest, config: RunConfig) -> Path:
    return absolute(str(request.log_dir or config.output_dir))


def _job(
    request: LaunchRequest,
    config: ResolvedRun,
    children: tuple[ProcessSpec, ...],
    hosts: Hosts | None = None,
) -> Job:
    return Job(
        children=children,
        log_folder=_log_folder(request, config),
        stall_limit=config.runtime.stall_limit,
        follow=not request.quiet,
        steps=config.train.max_steps if request.mode in ("train", "finetune") else None,
        hosts=hosts,
    )


def _start_hosts(hosts: str, request: LaunchRequest, table: RankTable | None) -> int:
    """Show, or run over ssh, one run_distribute.sh per host."""
    if request.nnodes is not None or request.node_rank is not None or request.node_ips:
        raise ConfigError(
            "--nnodes, --node_rank and --node_ips follow from --hosts; leave them out"
        )
    address, port = parse_master(request.master)
    parts = divide(
        parse_hosts(hosts),
        request.numbers,
        rank_size=request.rank_size,
        table=places_of_table(table) if table is not None and table.version != "2.0" else (),
        master=address,
        port=port or given_port(os.environ) or DEFAULT_PORT,
    )
    before = [f"--{name}" for name in ("quiet", "no_pinning", "use_rdma") if getattr(request, name)]
    before += ["--program", str(request.program)] if request.program else []
    before += ["--log_dir", str(absolute(str(request.log_dir)))] if request.log_dir else []
    after = [
        request.mode,
        *([] if request.rank_size is None else [str(request.rank_size)]),
        *request.overrides,
    ]
    commands = []
    for node, part in enumerate(parts):
        numbers, chosen = part.numbers, []
        if isinstance(numbers, range):
            chosen = [f"[{numbers.start},{numbers.stop})"]
        words = [
            *before,
            *([] if chosen else ["--devices", ",".join(map(str, numbers))]),
            *part.options,
            str(request.table or NO_TABLE[0]),
            str(request.config),
            *chosen,
            *after,
        ]
        commands.append(host_command(part.host, words, os.environ))
        _say(f"# host {node}: {part.host}\n{commands[-1].text}\n")
    if not request.ssh or is_asked("DRY_RUN"):
        return 0
    config = load_config(request.config, request.overrides)  # each host checks the layout
    job = Job(
        children=tuple(_over_ssh(node, command) for node, command in enumerate(commands)),
        log_folder=_log_folder(request, config),
        stall_limit=inf,
        follow=not request.quiet,
        over_ssh=True,
    )
    return _run(job, request)


def _over_ssh(node: int, command: HostCommand) -> ProcessSpec:
    words = (sys.executable, str(TOOL), "over_ssh", command.host, command.text)
    title = f"host {command.host}"
    return ProcessSpec(
        rank=node, command=words, environment={}, folder=f"host_{command.host}", title=title
    )


def _run(job: Job, request: LaunchRequest) -> int:
    """Supervise the job, unless DRY_RUN shows it, or DETACH leaves it to another process."""
    for name in FOREIGN:
        os.environ.pop(name, None)
    if is_asked("DRY_RUN"):
        for child in job.children:
            cores = f", on cores {','.join(map(str, child.cores))}" if child.cores else ""
            link = f", also {child.log_link}" if child.log_link else ""
            _say(f"\n# {child}: logs in {job.log_folder / child.log_folder}{link}{cores}\n")
            _say(shell_text(child.environment, child.command))
        return 0
    return _detach(job.log_folder, request) if is_asked("DETACH") else supervise(job)


def _detach(folder: Path, request: LaunchRequest) -> int:
    """Start the launch again in a process that outlives the terminal."""
    log = folder / "launcher.log"
    kind, *words = request.argv
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"==== {time.strftime('%Y-%m-%d %H:%M:%S')} ====\n")
            file.flush()
            process = subprocess.Popen(  # noqa: S603 - the same words
                # the ranks have their own logs
                [sys.executable, str(TOOL), kind, "--quiet", *words],
                env={name: value for name, value in os.environ.items() if name != "DETACH"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
    except OSError as error:
        raise ConfigError(
            f"{log}: cannot be written: {error.strerror or error}; give --log_dir DIR"
        ) from None
    tell(f"started in the background: process {process.pid}, messages in {log}")
    tell(f"stop it, so that its ranks save: kill {process.pid}")
    return 0


def _say(text: str) -> None:
    """Print a plan or a dry run. Raises OSError if it cannot be written."""
    sys.stdout.write(text)
    sys.stdout.flush()

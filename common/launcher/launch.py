"""Launch the ranks of this host, or show what would be launched."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from common.accelerators import require_accelerator
from common.cluster.environment import connect_limit
from common.cluster.places import Placement, find_places, places_of_table, server_of_pod
from common.cluster.rank_environment import given_port, parse_master, rank_command, shell_text
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import NotReadyError, read_table, wait_for_table
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.launcher.host_list import divide, host_command, parse_hosts
from common.launcher.jobs import job_of_ranks, log_folder, ranks_here
from common.launcher.nodes import settle_nodes
from common.launcher.rank_process import ProcessSpec
from common.launcher.request import NO_TABLE, LaunchRequest, absolute, is_asked
from common.launcher.supervisor import RESTARTABLE, Job, run_attempts
from common.launcher.terminal import tell
from common.log import show
from common.parallel.run import Run
from common.paths import TOOLS
from common.planner.show import describe_cluster
from common.processes.addresses import DEFAULT_PORT, LOOPBACK
from common.resolve.derive import resolve_mode
from common.run_folder import require_free_folder

TOOL = TOOLS / "launch.py"
"""Script that starts a launch again, on another host or in the background."""

Check = Callable[[str, Run], None]
"""Check of the inputs of a run mode, which raises GPT2Error."""
Load = Callable[[Sequence[str]], RunConfig]
"""Function that applies overrides to the configuration of the launch. Raises ConfigError."""


def start(request: LaunchRequest, load: Load, check: Check) -> int:
    """Plan, show, or start and supervise the ranks of this host. Returns the exit code.

    load: of the request's configuration. check: what rank 0 checks first, so that a refusal comes
    once, before there are ranks.
    """
    if request.ssh and request.hosts is None:
        raise ConfigError("--ssh needs --hosts: the names of the hosts")
    for name in ("all_ranks", "accelerator"):
        if getattr(request, name) and request.mode != "plan":
            raise ConfigError(f"--{name} is for the mode plan, not {request.mode}; leave it out")
    starts = request.mode != "plan" and not is_asked("DRY_RUN") and request.hosts is None
    waits = starts and not is_asked("DETACH")
    try:
        table = _read_table(request.table, wait=waits) if request.table else None
    except NotReadyError:
        if not starts:
            raise
        # including the wait
        return _detach(log_folder(request, load(request.overrides)), request)
    if request.hosts is not None:
        return _start_hosts(request.hosts, request, table, load)
    request = settle_nodes(request, meet=waits)
    master, port = parse_master(request.master)
    places = find_places(
        request.numbers,
        rank_size=request.rank_size,
        table=table,
        master=master,
        nodes=request.nnodes,
        node_rank=request.node_rank,
        pod=None if table is None else server_of_pod(table, os.environ),
    )
    config = resolve_mode(load(request.overrides), request.mode, world_size=places.world_size)
    if request.mode == "plan":
        show(_plan(request, config, places, table))
        return 0
    if config.parallel.strategy == "horovod" and not request.folder:
        raise _must_be_horovodrun(request, places)
    if starts and places.own[0].rank == 0:  # other hosts would see the hold of their own run
        if request.mode in ("train", "finetune"):
            require_free_folder(Path(config.output_dir))
        if request.program is None:
            check(request.mode, config)
    here = ranks_here(places, request, config)
    if waits and not request.folder:
        tell(here)
    elif not starts and not request.folder:
        show(f"# {here}\n")
    return _run(lambda number: job_of_ranks(request, config, places, table, port, starts=starts), request, config)


def _read_table(path: Path, *, wait: bool) -> RankTable:
    """Read a rank table that a platform may still be filling; in a pod it may be absent."""
    try:
        return read_table(path)
    except NotReadyError as error:
        if not wait:
            raise
        is_filled = path.exists() and b"initializing" not in path.read_bytes()
        limit = 10.0 if is_filled else connect_limit(os.environ)
        tell(f"{error}; waiting up to {limit:g} s", error=True)
        return wait_for_table(path, limit)


def _plan(request: LaunchRequest, config: Run, places: Placement, table: RankTable | None) -> str:
    """Raises ConfigError for an accelerator that is not known, or another number of them."""
    counted = re.fullmatch(r"(\d{1,9}) ?x ?(.+)", request.accelerator or "")
    if counted and int(counted[1]) != places.world_size:
        raise ConfigError(
            f"--accelerator {request.accelerator}: the layout has {places.world_size} ranks; leave"
            " the number out, or make them equal"
        )
    name = counted[2] if counted else request.accelerator
    return describe_cluster(
        config,
        places,
        config_path=request.config,
        overrides=request.overrides,
        table=(request.table, table) if request.table and table else None,
        all_ranks=request.all_ranks,
        environ=os.environ,
        device=require_accelerator(name) if name else None,
    )


def _must_be_horovodrun(request: LaunchRequest, places: Placement) -> ConfigError:
    """Return the error for a run that horovodrun has to start, with the command for it."""
    names = request.addresses or [
        "localhost" if host == LOOPBACK else host.replace("node ", "HOST") for host in places.hosts
    ]
    hosts = ",".join(f"{name}:{len(places.of_host(host))}" for name, host in zip(names, places.hosts, strict=True))
    command = rank_command(request.config, request.mode, request.overrides)
    words = ["horovodrun", "-np", str(places.world_size), "-H", hosts, *command]
    return ConfigError(
        "parallel.strategy=horovod: Horovod connects only ranks that horovodrun or mpirun has"
        f" started; start them with: {shlex.join(words)}"
    )


def _start_hosts(hosts: str, request: LaunchRequest, table: RankTable | None, load: Load) -> int:
    """Show, or run over ssh, one run_distribute.sh per host."""
    if request.nnodes is not None or request.node_rank is not None or request.node_ips:
        raise ConfigError("--nnodes, --node_rank and --node_ips follow from --hosts; leave them out")
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
    before += [] if request.max_restarts is None else ["--max_restarts", str(request.max_restarts)]
    before += ["--program", str(request.program)] if request.program else []
    before += ["--log_dir", str(absolute(str(request.log_dir)))] if request.log_dir else []
    after = [request.mode, *([] if request.rank_size is None else [str(request.rank_size)]), *request.overrides]
    children = []
    for node, (host, numbers, options) in enumerate(parts):
        paths = [str(request.table or NO_TABLE[0]), str(request.config)]
        if isinstance(numbers, range):
            words = [*before, *options, *paths, f"[{numbers.start},{numbers.stop})", *after]
        else:
            devices = ",".join(map(str, numbers))
            words = [*before, "--devices", devices, *options, *paths, *after]
        text = host_command(words, os.environ)
        title = f"host {host}"
        command = (sys.executable, str(TOOL), "over_ssh", host, text)
        children.append(ProcessSpec(rank=node, command=command, environment={}, folder=f"host_{host}", title=title))
        show(f"# host {node}: {host}\n{text}\n")
    if not request.ssh or is_asked("DRY_RUN"):
        return 0
    config = load(request.overrides)  # each host checks the layout
    job = Job(
        children=tuple(children),
        log_folder=log_folder(request, config),
        stall_limit=inf,
        follow=not request.quiet,
        over_ssh=True,
    )
    return _run(lambda number: job, request)


def _run(make_job: Callable[[int], Job], request: LaunchRequest, config: RunConfig | None = None) -> int:
    """Supervise the attempts of this host, unless DRY_RUN shows the first, or DETACH leaves them to
    another process. config: of a run whose training may be started again.
    """
    if is_asked("DRY_RUN"):
        job = make_job(0)
        full = job.children[0]
        for child in job.children:
            cores = f", on cores {','.join(map(str, child.cores))}" if child.cores else ""
            link = f", also {child.log_link}" if child.log_link else ""
            head = f"\n# {child}: logs in {job.log_folder / child.log_folder}{link}{cores}"
            own = [
                f"{name}={value}" for name, value in child.environment.items() if full.environment.get(name) != value
            ]
            if child is full or child.command != full.command:
                show(f"{head}\n{shell_text(child.environment, child.command)}")
            else:
                show(f"{head}; as {full} with\n{shlex.join(own)}\n")
        return 0
    if is_asked("DETACH"):
        return _detach(make_job(0).log_folder, request)
    if config is None or request.mode not in RESTARTABLE:
        return run_attempts(make_job).code
    given = config.runtime.max_restarts if request.max_restarts is None else request.max_restarts
    return run_attempts(make_job, most=given, folder=absolute(config.output_dir)).code


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
        raise ConfigError(f"{log}: cannot be written: {error.strerror or error}; give --log_dir DIR") from None
    tell(f"started in the background: process {process.pid}, messages in {log}")
    tell(f"stop it, so that its ranks save: kill {process.pid}")
    return 0

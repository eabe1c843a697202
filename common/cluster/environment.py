"""Rank of this process in its run, read from the variables of any launcher.

Nothing is started or connected here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.cluster.pods import in_pod
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import read_table, wait_for_table
from common.errors import ConfigError
from common.processes.addresses import DEFAULT_PORT, LOOPBACK, is_loopback
from common.whole_numbers import MOST_RANKS, shortened, whole_number

_PLATFORM = ("MA_JOB_DIR", "MA_LOG_DIR", "MA_MOUNT_PATH", "MA_LOCAL_LOG_PATH")


@dataclass(frozen=True, kw_only=True)
class Process:
    """One of ``world_size`` processes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this host."""
    local_world_size: int = 1
    """Processes of this host. msrun does not tell it; with several hosts it is a lower bound there.
    """
    device_id: int | None = None
    """Device assigned to this process; None means local_rank."""
    master: str | None = None
    """Address of the host of rank 0, if known."""
    port: int | None = None
    launcher: str = "none"
    """One of launch (ours), torchrun, horovodrun, msrun, mpirun, srun, rank table, none."""
    remarks: tuple[str, ...] = ()
    """Assumptions to write into the log."""


ALONE = Process()
"""The only process of a run."""


def find_process(environ: Mapping[str, str]) -> Process:
    """Find the rank of this process in each launcher's variables in turn.

    The order is ours and torchrun's, horovodrun's, msrun's, Ascend's, those of MPI, Slurm's.
    Without any, this is the only process. Raises ConfigError for a value that is not a number, for
    an incomplete pair, and where two launchers contradict each other.
    """
    for source in (_torchrun, _horovod, _msrun, _ascend, _mpirun, task_of_step):
        process = source(environ)
        if process is not None:
            return _checked(process)
    _check_mpi(environ)
    return ALONE


def announced_world_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes that any launcher announces; a size without a rank is enough.

    Raises ConfigError where two launchers disagree.
    """
    sizes = {
        name: _size(environ, name) for name in ("WORLD_SIZE", "RANK_SIZE") if environ.get(name)
    }
    if environ.get("RANK_TABLE_FILE"):
        sizes[f"the ranks in RANK_TABLE_FILE={environ['RANK_TABLE_FILE']}"] = _table(
            environ
        ).world_size
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"environment: {' and '.join(f'{name}: {size}' for name, size in sizes.items())}"
            " differ; make them agree"
        )
    if sizes:
        return next(iter(sizes.values()))
    found = find_process(environ)
    return None if found.launcher == "none" else found.world_size


def torch_variables(process: Process) -> dict[str, str]:
    """Return the variables that ``torch.distributed`` reads with ``env://``.

    Raises ConfigError if no address is known at which the processes meet.
    """
    if process.world_size > 1 and process.master is None:
        raise ConfigError(
            f"environment: rank {process.rank} of {process.world_size} does not know where to meet"
            " the others; set MASTER_ADDR to the address of the host of rank 0"
        )
    return {
        "RANK": str(process.rank),
        "WORLD_SIZE": str(process.world_size),
        "LOCAL_RANK": str(process.local_rank),
        "LOCAL_WORLD_SIZE": str(process.local_world_size),
        "MASTER_ADDR": process.master or LOOPBACK,
        "MASTER_PORT": str(process.port or DEFAULT_PORT),
    }


def is_scheduler(environ: Mapping[str, str]) -> bool:
    """Tell whether this is msrun's scheduler, by which the ranks find each other.

    It runs the same script but is not a rank.
    """
    return environ.get("MS_ROLE") == "MS_SCHED"


def in_modelarts(environ: Mapping[str, str]) -> bool:
    """Tell whether the platform's own path variables are set.

    Users are told not to define names that start with MA_.
    """
    return any(environ.get(name) for name in _PLATFORM)


# ---- one function per launcher, which returns a Process, or None without its variables ----


def _torchrun(environ: Mapping[str, str]) -> Process | None:
    rank = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    if rank is None:
        return None
    theirs = _rank_and_size(environ, "HOROVOD_RANK", "HOROVOD_SIZE")
    if theirs not in (None, rank):
        raise ConfigError(
            f"environment: RANK={rank[0]} of WORLD_SIZE={rank[1]}, but"
            f" HOROVOD_RANK={environ['HOROVOD_RANK']} of HOROVOD_SIZE={environ['HOROVOD_SIZE']};"
            " unset RANK and WORLD_SIZE where horovodrun starts the processes, else HOROVOD_RANK"
            " and HOROVOD_SIZE"
        )
    same_in_both = (environ.get("RANK_ID"), environ.get("RANK_SIZE")) == (
        environ["RANK"],
        environ["WORLD_SIZE"],
    )
    # for one process both may agree by chance, where the container has RANK_ID=0 and RANK_SIZE=1
    ours = "GPT2_LAUNCHER_PID" in environ or (same_in_both and "TORCHELASTIC_RUN_ID" not in environ)
    # DeepSpeed's launcher sets the second
    sizes = [name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environ.get(name)]
    here = _size(environ, sizes[0]) if sizes else 1
    return Process(
        rank=rank[0],
        world_size=rank[1],
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_world_size=here,
        # another launcher's DEVICE_ID may be the container's, equal for all its ranks
        device_id=_optional(environ, "DEVICE_ID") if ours else None,
        master=_master(environ),
        port=_port(environ),
        launcher="launch" if ours else "torchrun",
        remarks=() if ours else _check_step(environ, here, rank[1]),
    )


def _check_step(environ: Mapping[str, str], here: int, world: int) -> tuple[str, ...]:
    """Return a remark if each of several tasks on a node has started all processes of the node.

    Runs of one node each may be meant. Raises ConfigError for a run of several nodes.
    """
    tasks = _tasks_here(environ)
    if "TORCHELASTIC_RUN_ID" not in environ or tasks * here <= max(world, here):
        return ()
    text = (
        f"srun has started {tasks} tasks on this node, and each of them a torchrun with {here}"
        f" processes, {tasks * here} for a run of {world}; give srun --ntasks-per-node=1"
    )
    if world > here:
        raise ConfigError(f"environment: {text}")
    return (f"{text}, unless these are separate runs on devices of their own",)


def _horovod(environ: Mapping[str, str]) -> Process | None:
    """Find the rank in Horovod's variables.

    Source: create_slot_env_vars and create_run_envs of horovod/runner/gloo_run.py, 0.28. Over MPI,
    horovodrun sets none of them, and MPI's own are read. Rank 0 is on the first host of -H. All
    ranks know the address of horovodrun's host.
    """
    pair = _rank_and_size(environ, "HOROVOD_RANK", "HOROVOD_SIZE")
    if pair is None:
        return None
    here = _size(environ, "HOROVOD_LOCAL_SIZE")
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or None
    master = _master(environ) or (LOOPBACK if here == pair[1] else address)
    if master is None:
        raise ConfigError(
            f"environment: horovodrun started {pair[1]} processes, {here} of them here, and neither"
            " HOROVOD_GLOO_RENDEZVOUS_ADDR nor MASTER_ADDR is set; set MASTER_ADDR to the address"
            " of the host of rank 0"
        )
    meeting = _number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT", 0)
    return Process(
        rank=pair[0],
        world_size=pair[1],
        local_rank=_number(environ, "HOROVOD_LOCAL_RANK"),
        local_world_size=here,
        master=master,
        # simultaneous runs have different ports of horovodrun
        port=_port(environ) or (_own_port(meeting) if meeting else DEFAULT_PORT),
        launcher="horovodrun",
    )


def _msrun(environ: Mapping[str, str]) -> Process | None:
    """Find the rank in msrun's variables. DEVICE_ID is the number on the host.

    Source: mindspore/parallel/cluster/process_entity/_api.py of MindSpore 2.10.
    """
    if environ.get("MS_ROLE") not in ("MS_WORKER", "MS_SCHED"):
        return None
    world = _size(environ, "MS_WORKER_NUM")
    host = _master(environ) or environ.get("MS_SCHED_HOST") or None
    port = _port(environ) or _port(environ, "MS_SCHED_PORT")
    if is_scheduler(environ):
        return Process(world_size=world, master=host, port=port, launcher="msrun")
    if not environ.get("MS_NODE_ID"):
        raise ConfigError(
            "environment: MS_ROLE=MS_WORKER, but MS_NODE_ID is not set; give msrun --node_rank on"
            " every host"
        )
    rank = _number(environ, "MS_NODE_ID")
    local = _number(environ, "DEVICE_ID", rank)
    together = host is not None and is_loopback(host)
    return Process(
        rank=rank,
        world_size=world,
        local_rank=local,
        local_world_size=world if together else max(local + 1, 1),
        device_id=local,
        master=host,
        port=port,
        launcher="msrun",
    )


def _ascend(environ: Mapping[str, str]) -> Process | None:
    """Find the rank in RANK_ID with RANK_SIZE, or with the rank table instead of it."""
    has_table = bool(environ.get("RANK_TABLE_FILE"))
    if not has_table and _is_ascend_container(environ):
        remark = (
            "RANK_ID=0, but neither RANK_SIZE nor RANK_TABLE_FILE is set: assuming a run of one"
            " process"
        )
        return Process(device_id=_assigned_device(environ), remarks=(remark,))
    if not has_table:
        pair = _rank_and_size(environ, "RANK_ID", "RANK_SIZE")
        return None if pair is None else _without_table(environ, *pair)
    table = _table(environ)
    world = _size(environ, "RANK_SIZE") if environ.get("RANK_SIZE") else table.world_size
    if world != table.world_size:
        raise ConfigError(
            f"environment: RANK_SIZE={world}, but RANK_TABLE_FILE={environ['RANK_TABLE_FILE']}"
            f" holds {table.world_size}; make them agree"
        )
    if not environ.get("RANK_ID") and world > 1:
        raise ConfigError(
            f"environment: RANK_TABLE_FILE={environ['RANK_TABLE_FILE']} holds {world} ranks, but"
            " RANK_ID is not set, so the rank of this process is unknown; start with"
            " scripts/run_distribute.sh, or unset RANK_TABLE_FILE"
        )
    rank = _number(environ, "RANK_ID", 0)
    _check_rank(rank, world, "RANK_ID")
    server, device = table.place(rank)
    assigned = _assigned_device(environ)
    return Process(
        rank=rank,
        world_size=world,
        local_rank=[item.rank_id for item in server.devices].index(rank),
        local_world_size=len(server.devices),
        device_id=device.device_id if assigned is None else assigned,
        master=_master(environ)
        or _first_worker(environ)
        or (table.place(0)[0].address if len(table.servers) > 1 else LOOPBACK),
        port=_port(environ) or DEFAULT_PORT,
        launcher="rank table",
    )


def _is_ascend_container(environ: Mapping[str, str]) -> bool:
    """Tell whether the variables are those of a container on one host, whose rank 0 belongs to no
    run.
    """
    return (
        not environ.get("RANK_SIZE")
        and environ.get("RANK_ID") == "0"
        and _number(environ, "MA_NUM_HOSTS", 1, least=1) == 1
    )


def _without_table(environ: Mapping[str, str], rank: int, world: int) -> Process:
    """Return the rank without a table: equally many on each of MA_NUM_HOSTS hosts (default 1)."""
    hosts = _number(environ, "MA_NUM_HOSTS", 1, least=1)
    if world % hosts:
        raise ConfigError(
            f"environment: RANK_SIZE={world} ranks cannot be divided equally over"
            f" MA_NUM_HOSTS={hosts} hosts"
        )
    here = world // hosts
    return Process(
        rank=rank,
        world_size=world,
        local_rank=rank % here,
        local_world_size=here,
        device_id=_assigned_device(environ),
        master=_master(environ) or _first_worker(environ) or (LOOPBACK if hosts == 1 else None),
        port=_port(environ) or DEFAULT_PORT,
        launcher="rank table",
    )


def _mpirun(environ: Mapping[str, str]) -> Process | None:
    """Find the rank in the variables of Open MPI."""
    name = "OMPI_COMM_WORLD_{}"
    pair = _rank_and_size(environ, name.format("RANK"), name.format("SIZE"))
    if pair is None or not environ.get(name.format("LOCAL_RANK")):
        return None
    rank, world = pair
    here = _size(environ, name.format("LOCAL_SIZE"))
    master = _master(environ) or (LOOPBACK if here == world else None)
    if master is None:
        raise ConfigError(
            f"environment: mpirun started {world} processes, {here} of them here, and MASTER_ADDR"
            " is not set; name the host of rank 0: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 ..."
        )
    return Process(
        rank=rank,
        world_size=world,
        local_rank=_number(environ, name.format("LOCAL_RANK")),
        local_world_size=here,
        master=master,
        port=_port(environ) or DEFAULT_PORT,
        launcher="mpirun",
    )


def _check_mpi(environ: Mapping[str, str]) -> None:
    """Reject several processes that would each run as a single one and write into one folder.

    Raises ConfigError.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if environ.get(name) and _size(environ, name) > 1:
            raise ConfigError(
                f"environment: {name}={environ[name]}, but not which of these processes this one"
                " is on its host; start them with Open MPI's mpirun, srun or torchrun, or unset"
                f" {name} for one process"
            )


# Slurm's numbers of the batch script, an interactive shell, and anything outside of steps
_RESERVED_STEPS = 0xFFFFFFF0


def task_of_step(environ: Mapping[str, str]) -> Process | None:
    """Find the rank in Slurm's variables, only inside a step that srun started.

    A batch script also has SLURM_PROCID=0, but no step. The list of nodes is sorted, and so does
    not begin with the node of rank 0 under a host file. Source: srun(1), sbatch(1). Raises
    ConfigError then.
    """
    if (
        not environ.get("SLURM_STEP_NODELIST")
        or _number(environ, "SLURM_STEP_ID", _RESERVED_STEPS) >= _RESERVED_STEPS
    ):
        return None
    size = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    pair = _rank_and_size(environ, "SLURM_PROCID", size)
    if pair is None:
        return None
    node, local = _number(environ, "SLURM_NODEID", 0), _number(environ, "SLURM_LOCALID", 0)
    several = pair[1] > 1 and environ.get("SLURM_STEP_NUM_NODES") != "1"
    by_file = environ.get("SLURM_DISTRIBUTION") == "arbitrary" or pair[0] == 0 < node
    if several and by_file and not _master(environ):
        raise ConfigError(
            "environment: srun has placed the tasks by a host file (SLURM_DISTRIBUTION,"
            f" SLURM_NODEID), and SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} is sorted,"
            " so it does not tell where rank 0 is; set MASTER_ADDR to the node of rank 0, the"
            " first line of the host file"
        )
    job = _number(environ, "SLURM_JOB_ID", 0) + _number(environ, "SLURM_STEP_ID", 0)
    return Process(
        rank=pair[0],
        world_size=pair[1],
        local_rank=local,
        local_world_size=_tasks_here(environ) or local + 1,
        master=_master(environ) or first_node(environ["SLURM_STEP_NODELIST"]),
        # steps of one job that run at the same time have different numbers
        port=_port(environ) or _own_port(job),
        launcher="srun",
    )


def first_node(nodes: str) -> str:
    """Return the first name of a Slurm list: ``gpu[03-05,9],login1`` -> ``gpu03``. Raises
    ConfigError.
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+", nodes.strip())
    name = re.sub(r"\[(\w+)(?:[-,][\w,-]*)?\]", r"\1", first.group()) if first else ""
    if not name or "[" in name:
        raise ConfigError(
            f"environment: SLURM_STEP_NODELIST={nodes}: expected names such as gpu[03-05,9],login1;"
            " set MASTER_ADDR"
        )
    return name


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Return the number of tasks that srun has started on this node; 0 if it does not tell."""
    counts = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 0


def _tasks_per_node(text: str) -> list[int]:
    """Expand ``4(x2),3`` to [4, 4, 3].

    Empty for any other form, and for more nodes than a job can have.
    """
    found: list[int] = []
    for word in text.split(","):
        part = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", word)
        if part is None or len(found) + int(part[2] or 1) > MOST_RANKS:
            return []
        found += [int(part[1])] * int(part[2] or 1)
    return found


# ---- values ----


def _rank_and_size(
    environ: Mapping[str, str], rank_name: str, size_name: str
) -> tuple[int, int] | None:
    given = [name for name in (rank_name, size_name) if environ.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = size_name if given == [rank_name] else rank_name
        if given == [size_name]:
            _size(environ, size_name)
        raise ConfigError(
            f"environment: {given[0]}={environ[given[0]]}, but {missing} is not set; set both, or"
            f" unset {given[0]}"
        )
    rank, world = _number(environ, rank_name), _size(environ, size_name)
    _check_rank(rank, world, rank_name)
    return rank, world


def _check_rank(rank: int, world: int, name: str) -> None:
    if rank >= world:
        raise ConfigError(
            f"environment: {name}={rank}, but there are {world} processes: expected 0 to"
            f" {world - 1}"
        )


def _checked(process: Process) -> Process:
    if process.local_rank >= process.local_world_size:
        raise ConfigError(
            f"environment: {process.launcher}: rank {process.local_rank} on this host (LOCAL_RANK)"
            f" of {process.local_world_size} (LOCAL_WORLD_SIZE): expected 0 to"
            f" {process.local_world_size - 1}"
        )
    if process.local_world_size > process.world_size:
        raise ConfigError(
            f"environment: {process.launcher}: {process.local_world_size} processes on this host,"
            f" but {process.world_size} in total; unset variables left by an earlier launch"
        )
    return process


def _number(
    environ: Mapping[str, str],
    name: str,
    otherwise: int | None = None,
    *,
    least: int = 0,
    what: str = "a number",
) -> int:
    text = environ.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    number = whole_number(text, most_digits=10)
    if number is None or number < least:
        found = f"{name}={shortened(text)}" if text else f"{name} is not set"
        raise ConfigError(f"environment: {found}: expected {what}, {least} or more")
    return number


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def _size(environ: Mapping[str, str], name: str) -> int:
    size = _number(environ, name, least=1, what="the number of processes")
    if size > MOST_RANKS:
        raise ConfigError(
            f"environment: {name}={size}: expected the number of processes, {MOST_RANKS} at most"
        )
    return size


def _assigned_device(environ: Mapping[str, str]) -> int | None:
    device = _optional(environ, "DEVICE_ID")
    return _optional(environ, "ASCEND_DEVICE_ID") if device is None else device


def _master(environ: Mapping[str, str]) -> str | None:
    return environ.get("MASTER_ADDR") or None


def _port(environ: Mapping[str, str], name: str = "MASTER_PORT") -> int | None:
    port = _optional(environ, name)
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"environment: {name}={port}: expected 1 to 65535")
    return port


def _own_port(number: int) -> int:
    """Return a port for a run of this number, above those that the system assigns."""
    return 61440 + number % 4095


def _first_worker(environ: Mapping[str, str]) -> str | None:
    return environ.get("VC_WORKER_HOSTS", "").partition(",")[0].strip() or None


def _table(environ: Mapping[str, str]) -> RankTable:
    """Read RANK_TABLE_FILE.

    A platform fills it while the processes start; the wait for it is as long as HCCL's.
    """
    path = Path(environ["RANK_TABLE_FILE"])
    return (
        wait_for_table(path, _number(environ, "HCCL_CONNECT_TIMEOUT", 1800))
        if in_modelarts(environ) or in_pod(environ)
        else read_table(path)
    )

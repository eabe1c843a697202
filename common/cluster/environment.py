"""Rank of this process in its run, read from the variables of any launcher.

Nothing is started or connected here.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.processes.addresses import DEFAULT_PORT, LOOPBACK, OWN_PORTS, is_loopback
from common.whole_numbers import MAX_RANKS, whole_number

if TYPE_CHECKING:
    from common.cluster.rank_table import RankTable

_PLATFORM = ("MA_JOB_DIR", "MA_LOG_DIR", "MA_MOUNT_PATH", "MA_LOCAL_LOG_PATH")
_RESERVED_STEPS = 0xFFFFFFF0
"""From here on Slurm numbers batch scripts, interactive shells, and what is outside of steps."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One of ``world_size`` processes."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this host."""
    local_world_size: int = 1
    """Processes of this host. msrun does not tell it; with several hosts it is a lower bound there."""
    device_id: int | None = None
    """Device assigned to this process; None means local_rank."""
    master: str | None = None
    """Address of the host of rank 0, if known."""
    port: int | None = None
    launcher: str = "none"
    """One of launch (ours), torchrun, horovodrun, msrun, mpirun, srun, rank table, pod, none."""
    remarks: tuple[str, ...] = ()
    """Assumptions to write into the log."""

    @property
    def most_here(self) -> int:
        """Most processes that may share this host: the same number on every rank."""
        return self.world_size if self.launcher == "msrun" else self.local_world_size


ALONE = Process()


def find_process(environ: Mapping[str, str]) -> Process:
    """Find the rank of this process in each launcher's variables in turn.

    The order is ours and torchrun's, horovodrun's, msrun's, Ascend's, Open MPI's, Slurm's. Without any, this is the
    only process. Raises ConfigError for a value that is not a number, for an incomplete pair, where two launchers
    contradict each other, and for several processes of an MPI that does not number those of a host.
    """
    variables = _Variables(environ)
    horovod = partial(_of_mpi, "HOROVOD_", "horovodrun")
    open_mpi = partial(_of_mpi, "OMPI_COMM_WORLD_", "mpirun")
    for source in (_torchrun, horovod, _msrun, _ascend, open_mpi, _srun):
        found = source(variables)
        if found is not None and not found.local_rank < found.local_world_size <= found.world_size:
            raise ConfigError(
                f"environment: {found.launcher}: rank {found.local_rank} on this host (LOCAL_RANK)"
                f" of {found.local_world_size} (LOCAL_WORLD_SIZE), of {found.world_size} in total:"
                " these cannot be; unset variables left by an earlier launch"
            )
        if found is not None:
            return found
    # each of several would run as a single one
    for name in ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if variables.text(name) and variables.size(name) > 1:
            raise ConfigError(
                f"environment: {name}={environ[name]}, but not which of these processes this one"
                " is on its host; start them with Open MPI's mpirun, srun or torchrun, or unset"
                f" {name} for one process"
            )
    return ALONE


def announced_world_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of processes that any launcher announces, if only a size.

    Raises ConfigError where two launchers disagree.
    """
    variables = _Variables(environ)
    sizes = {variables.size(name) for name in ("WORLD_SIZE", "RANK_SIZE") if environ.get(name)}
    if environ.get("RANK_TABLE_FILE"):
        sizes.add(variables.table().world_size)
    if len(sizes) > 1:
        raise ConfigError(
            "environment: WORLD_SIZE, RANK_SIZE and the ranks in RANK_TABLE_FILE differ:"
            f" {', '.join(map(str, sorted(sizes)))}; make them agree"
        )
    if sizes:
        return sizes.pop()
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


def task_of_step(environ: Mapping[str, str]) -> Process | None:
    """Return the rank in a step that srun started, None outside of steps. Raises ConfigError."""
    return _srun(_Variables(environ))


def place_of_pod(environ: Mapping[str, str]) -> Process | None:
    """Return this pod among those of a PyTorchJob or TrainJob; None outside of one, and alone.

    PET_NNODES counts pods. Older operators set only WORLD_SIZE, which counts pods too, and RANK.
    Source: pkg/controller.v1/pytorch of kubeflow/training-operator, envvar.go (1.9, and 1.3 without
    PET_*). Raises ConfigError for an incomplete set, and for an elastic job.
    """
    variables = _Variables(environ)
    nodes, master = variables.text("PET_NNODES"), variables.master
    if nodes is not None and ":" in nodes:
        raise ConfigError(
            f"environment: PET_NNODES={nodes}: the job is elastic; remove"
            " elasticPolicy from the PyTorchJob: a run has a fixed number of ranks"
        )
    if nodes is None and not (in_pod(environ) and master and variables.text("WORLD_SIZE")):
        return None
    count = "WORLD_SIZE" if nodes is None else "PET_NNODES"
    world = variables.size(count)
    if world == 1:
        return None
    address = master or variables.text("PET_MASTER_ADDR")
    if address is None:
        raise ConfigError(
            f"environment: {count}={world}, but neither MASTER_ADDR nor PET_MASTER_ADDR is set;"
            " give the PyTorchJob a Master, or the command --master IP:PORT"
        )
    named = nodes is not None and variables.text("PET_NODE_RANK")
    rank = variables.rank("PET_NODE_RANK" if named else "RANK", world)
    if rank == 0 and is_loopback(address):  # pytorch-operator's pod.go, before 1.3
        address = socket.gethostname()
    port = variables.port() or variables.port("PET_MASTER_PORT") or DEFAULT_PORT
    return Process(rank=rank, world_size=world, master=address, port=port, launcher="pod")


def connect_limit(environ: Mapping[str, str]) -> float:
    """Return the seconds within which all hosts have to connect. Raises ConfigError."""
    return float(_Variables(environ).number("HCCL_CONNECT_TIMEOUT", 1800, least=1, what="whole seconds"))


def is_scheduler(environ: Mapping[str, str]) -> bool:
    """Tell whether this is msrun's scheduler, which runs the same script but is not a rank."""
    return environ.get("MS_ROLE") == "MS_SCHED"


def in_pod(environ: Mapping[str, str]) -> bool:
    """Tell whether Kubernetes started this container."""
    return bool(environ.get("KUBERNETES_SERVICE_HOST"))


def in_modelarts(environ: Mapping[str, str]) -> bool:
    """Tell whether the platform's own path variables are set, which users must not define."""
    return any(environ.get(name) for name in _PLATFORM)


class _Variables:
    """Values of variables; an empty one counts as not set. Raises ConfigError for a wrong one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.master = self.text("MASTER_ADDR")

    def text(self, name: str) -> str | None:
        return self.environ.get(name) or None

    def number(self, name: str, otherwise: int | None = None, *, least: int = 0, what: str = "a number") -> int:
        text = self.environ.get(name, "")
        if not text and otherwise is not None:
            return otherwise
        number = whole_number(text)
        if number is None or number < least:
            found = f"{name}={text}" if text else f"{name} is not set"
            raise ConfigError(f"environment: {found}: expected {what}, {least} or more")
        return number

    def size(self, name: str) -> int:
        size = self.number(name, least=1, what="the number of processes")
        if size > MAX_RANKS:
            raise ConfigError(f"environment: {name}={size}: expected the number of processes, {MAX_RANKS} at most")
        return size

    def rank_and_size(self, rank_name: str, size_name: str) -> tuple[int, int] | None:
        given = [name for name in (rank_name, size_name) if self.text(name)]
        size = self.size(size_name) if size_name in given else 0
        if len(given) == 1:
            missing = size_name if given == [rank_name] else rank_name
            raise ConfigError(
                f"environment: {given[0]}={self.environ[given[0]]}, but {missing} is not set; set"
                f" both, or unset {given[0]}"
            )
        return (self.rank(rank_name, size), size) if given else None

    def rank(self, name: str, world: int, otherwise: int | None = None) -> int:
        rank = self.number(name, otherwise)
        if rank >= world:
            raise ConfigError(f"environment: {name}={rank}, but there are {world} processes: expected 0 to {world - 1}")
        return rank

    def process(self, launcher: str, pair: tuple[int, int], local: int, here: int, **more: Any) -> Process:
        """Return a process. more: fields, of which the variables override master and port."""
        more["master"] = self.master or more.get("master")
        more["port"] = self.port() or more.get("port")
        more |= {"launcher": launcher, "local_rank": local, "local_world_size": here}
        return Process(rank=pair[0], world_size=pair[1], **more)

    def port(self, name: str = "MASTER_PORT") -> int | None:
        port = self.number(name) if self.text(name) else None
        if port is not None and not 0 < port < 65536:
            raise ConfigError(f"environment: {name}={port}: expected 1 to 65535")
        return port

    def device(self, *names: str) -> int | None:
        return next((self.number(name) for name in names if self.text(name)), None)

    def first_worker(self) -> str | None:
        return self.environ.get("VC_WORKER_HOSTS", "").partition(",")[0].strip() or None

    def tasks_here(self) -> int:
        """Return the number of tasks that srun has started on this node; 0 if it does not tell."""
        node = self.number("SLURM_NODEID", 0)
        # such as 4(x2),3
        for word in self.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
            part = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", word)
            if part is None:
                return 0
            node -= int(part[2] or 1)
            if node < 0:
                return int(part[1])
        return 0

    def table(self) -> RankTable:
        """Read RANK_TABLE_FILE, which a platform fills while the processes start."""
        # not at the top of the file: --help of run_gpt2.py loads no library
        from common.cluster.rank_table_files import read_table, wait_for_table

        path = Path(self.environ["RANK_TABLE_FILE"])
        if in_modelarts(self.environ) or in_pod(self.environ):
            return wait_for_table(path, connect_limit(self.environ))
        return read_table(path)


# ---- one function per launcher, which returns a Process, or None without its variables ----


def _torchrun(variables: _Variables) -> Process | None:
    environ = variables.environ
    pair = variables.rank_and_size("RANK", "WORLD_SIZE")
    if pair is None:
        return None
    if variables.rank_and_size("HOROVOD_RANK", "HOROVOD_SIZE") not in (None, pair):
        raise ConfigError(
            f"environment: RANK={pair[0]} of WORLD_SIZE={pair[1]}, but HOROVOD_RANK={environ['HOROVOD_RANK']} of"
            f" HOROVOD_SIZE={environ['HOROVOD_SIZE']}; unset RANK and WORLD_SIZE where horovodrun starts the"
            " processes, else HOROVOD_RANK and HOROVOD_SIZE"
        )
    same_in_both = (environ.get("RANK_ID"), environ.get("RANK_SIZE")) == (environ["RANK"], environ["WORLD_SIZE"])
    # for one process both may agree by chance, where the container has RANK_ID=0 and RANK_SIZE=1
    ours = "GPT2_LAUNCHER_PID" in environ or (same_in_both and "TORCHELASTIC_RUN_ID" not in environ)
    # DeepSpeed's launcher sets the second
    sizes = [name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environ.get(name)]
    here = variables.size(sizes[0]) if sizes else 1
    local, launcher = variables.number("LOCAL_RANK", 0), "launch" if ours else "torchrun"
    # another launcher's DEVICE_ID may be the container's, equal for all its ranks
    device = variables.device("DEVICE_ID") if ours else None
    tasks = 0 if ours else variables.tasks_here()
    remarks: tuple[str, ...] = ()
    # each of several tasks on a node has started all processes of the node
    if "TORCHELASTIC_RUN_ID" in environ and tasks * here > max(pair[1], here):
        text = (
            f"srun has started {tasks} tasks on this node, and each of them a torchrun with {here}"
            f" processes, {tasks * here} for a run of {pair[1]}; give srun --ntasks-per-node=1"
        )
        if pair[1] > here:
            raise ConfigError(f"environment: {text}")
        remarks = (f"{text}, unless these are separate runs on devices of their own",)
    return variables.process(launcher, pair, local, here, device_id=device, remarks=remarks)


def _of_mpi(prefix: str, launcher: str, variables: _Variables) -> Process | None:
    """Find the rank in the variables of Open MPI, or of horovodrun, whose own host all ranks know.

    Source: create_slot_env_vars and create_run_envs of horovod/runner/gloo_run.py, 0.28. Over MPI,
    horovodrun sets none of them, and MPI's own are read. Rank 0 is on the first host of -H.
    """
    pair = variables.rank_and_size(f"{prefix}RANK", f"{prefix}SIZE")
    if pair is None or not variables.text(f"{prefix}LOCAL_RANK"):
        return None
    here = variables.size(f"{prefix}LOCAL_SIZE")
    of_horovod = launcher == "horovodrun"
    known = variables.text("HOROVOD_GLOO_RENDEZVOUS_ADDR") if of_horovod else None
    master = variables.master or (LOOPBACK if here == pair[1] else known)
    if master is None:
        started = f"{launcher} started {pair[1]} processes, {here} of them here, and"
        raise ConfigError(
            f"environment: {started} MASTER_ADDR is not set; name the host of rank 0: mpirun -x"
            " MASTER_ADDR=HOST_OF_RANK_0 ..."
            if not of_horovod
            else f"environment: {started} neither HOROVOD_GLOO_RENDEZVOUS_ADDR nor MASTER_ADDR is"
            " set; set MASTER_ADDR to the address of the host of rank 0"
        )
    # simultaneous runs have different ports of horovodrun
    meeting = variables.number("HOROVOD_GLOO_RENDEZVOUS_PORT", 0) if of_horovod else 0
    port = OWN_PORTS[meeting % len(OWN_PORTS)] if meeting else DEFAULT_PORT
    local = variables.number(f"{prefix}LOCAL_RANK")
    return variables.process(launcher, pair, local, here, master=master, port=port)


def _msrun(variables: _Variables) -> Process | None:
    """Find the rank in msrun's variables. DEVICE_ID is the number on the host.

    Source: mindspore/parallel/cluster/process_entity/_api.py of MindSpore 2.10.
    """
    if variables.text("MS_ROLE") not in ("MS_WORKER", "MS_SCHED"):
        return None
    world = variables.size("MS_WORKER_NUM")
    host = variables.master or variables.text("MS_SCHED_HOST")
    port = variables.port() or variables.port("MS_SCHED_PORT")
    if is_scheduler(variables.environ):
        return Process(world_size=world, master=host, port=port, launcher="msrun")
    if not variables.text("MS_NODE_ID"):
        raise ConfigError(
            "environment: MS_ROLE=MS_WORKER, but MS_NODE_ID is not set; give msrun --node_rank on every host"
        )
    rank = variables.number("MS_NODE_ID")
    local = variables.number("DEVICE_ID", rank)
    here = world if host is not None and is_loopback(host) else local + 1
    return variables.process("msrun", (rank, world), local, here, device_id=local, master=host, port=port)


def _ascend(variables: _Variables) -> Process | None:
    """Find the rank in RANK_ID with RANK_SIZE, or with the rank table instead of it."""
    if variables.text("RANK_TABLE_FILE"):
        return _in_table(variables)
    if not (variables.text("RANK_ID") or variables.text("RANK_SIZE")):
        return None
    device = variables.device("DEVICE_ID", "ASCEND_DEVICE_ID")
    hosts = variables.number("MA_NUM_HOSTS", 1, least=1)
    # a container on one host, whose rank 0 belongs to no run
    if not variables.text("RANK_SIZE") and variables.text("RANK_ID") == "0" and hosts == 1:
        remark = "RANK_ID=0, but neither RANK_SIZE nor RANK_TABLE_FILE is set: assuming a run of one process"
        return Process(device_id=device, remarks=(remark,))
    pair = variables.rank_and_size("RANK_ID", "RANK_SIZE")
    assert pair is not None
    if pair[1] % hosts:
        raise ConfigError(
            f"environment: RANK_SIZE={pair[1]} ranks cannot be divided equally over MA_NUM_HOSTS={hosts} hosts"
        )
    here = pair[1] // hosts
    master = variables.first_worker() or (LOOPBACK if hosts == 1 else None)
    local, port = pair[0] % here, DEFAULT_PORT
    return variables.process("rank table", pair, local, here, device_id=device, master=master, port=port)


def _in_table(variables: _Variables) -> Process:
    table, path = variables.table(), variables.text("RANK_TABLE_FILE")
    world = table.world_size
    if variables.text("RANK_SIZE") and variables.size("RANK_SIZE") != world:
        raise ConfigError(
            f"environment: RANK_SIZE={variables.size('RANK_SIZE')}, but RANK_TABLE_FILE={path}"
            f" holds {world}; make them agree"
        )
    if not variables.text("RANK_ID") and world > 1:
        raise ConfigError(
            f"environment: RANK_TABLE_FILE={path} holds {world} ranks, but RANK_ID is not set, so the rank of this"
            " process is unknown; start with scripts/run_distribute.sh, or unset RANK_TABLE_FILE"
        )
    rank = variables.rank("RANK_ID", world, 0)
    server, device = table.places()[rank]
    assigned = variables.device("DEVICE_ID", "ASCEND_DEVICE_ID")
    first = table.server_list[0].address if len(table.server_list) > 1 else LOOPBACK
    local, here, port = server.device.index(device), len(server.device), DEFAULT_PORT
    own, master = device.device_id if assigned is None else assigned, variables.first_worker() or first
    return variables.process("rank table", (rank, world), local, here, device_id=own, master=master, port=port)


def _srun(variables: _Variables) -> Process | None:
    """Find the rank in Slurm's variables, only inside a step that srun started.

    A batch script also has SLURM_PROCID=0, but no step. Source: srun(1), sbatch(1).
    """
    nodes = variables.text("SLURM_STEP_NODELIST")
    if nodes is None:
        return None
    step = variables.number("SLURM_STEP_ID", _RESERVED_STEPS)
    if step >= _RESERVED_STEPS:
        return None
    size = "SLURM_STEP_NUM_TASKS" if variables.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    pair = variables.rank_and_size("SLURM_PROCID", size)
    if pair is None:
        return None
    node, local = variables.number("SLURM_NODEID", 0), variables.number("SLURM_LOCALID", 0)
    several = pair[1] > 1 and variables.text("SLURM_STEP_NUM_NODES") != "1"
    by_file = variables.text("SLURM_DISTRIBUTION") == "arbitrary" or pair[0] == 0 < node
    if several and by_file and not variables.master:
        raise ConfigError(
            "environment: srun has placed the tasks by a host file (SLURM_DISTRIBUTION,"
            f" SLURM_NODEID), and SLURM_STEP_NODELIST={nodes} is sorted, so it does not tell where"
            " rank 0 is; set MASTER_ADDR to the node of rank 0, the first line of the host file"
        )
    here, master = variables.tasks_here() or local + 1, variables.master or first_node(nodes)
    # steps of one job that run at the same time have different numbers
    port = OWN_PORTS[(variables.number("SLURM_JOB_ID", 0) + step) % len(OWN_PORTS)]
    return variables.process("srun", pair, local, here, master=master, port=port)


def first_node(nodes: str) -> str:
    """Return the first name of a Slurm list: ``gpu[03-05,9],login1`` -> ``gpu03``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+", nodes.strip())
    name = re.sub(r"\[(\w+)(?:[-,][\w,-]*)?\]", r"\1", first.group()) if first else ""
    if not name or "[" in name:
        raise ConfigError(
            f"environment: SLURM_STEP_NODELIST={nodes}: expected names such as gpu[03-05,9],login1; set MASTER_ADDR"
        )
    return name

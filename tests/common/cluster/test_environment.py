"""Rank of a process from the variables of every launcher, whole and damaged."""

from pathlib import Path
from typing import Any

import pytest

from common.cluster.environment import ALONE, Process, announced_world_size, find_process, first_node, torch_variables
from common.errors import ConfigError


def process(
    rank: int, size: int, local: int, here: int, master: str | None, port: int | None, name: str,
    **more: Any,
) -> Process:  # fmt: skip
    return Process(
        **{"rank": rank, "world_size": size, "local_rank": local, "local_world_size": here},
        **{"master": master, "port": port, "launcher": name, **more},
    )


def env(text: str, **more: str) -> dict[str, str]:
    """Return the variables of a text such as ``RANK=0 WORLD_SIZE=2``."""
    return dict(word.split("=", 1) for word in text.split()) | more


RANKS = env("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29501")
TORCHRUN = {**RANKS, **env("LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none")}
ONE = env("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=29501")
# as msrun of MindSpore 2.10 sets them: mindspore/parallel/cluster/process_entity/_api.py
MSRUN = env(
    "MS_ROLE=MS_WORKER MS_NODE_ID=3 MS_WORKER_NUM=4 MS_SCHED_HOST=127.0.0.1 MS_SCHED_PORT=8118"
    " MS_TOPO_TIMEOUT=600 RANK_ID=3 RANK_SIZE=4 DEVICE_ID=3"
)
# mpirun(1) of Open MPI 4, "Environment Variables"
OPEN_MPI = env(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1"
    " OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=1"
)
MPI_ALONE = env("OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1")
# horovodrun --gloo: create_slot_env_vars and create_run_envs of horovod/runner/gloo_run.py, 0.28
HOROVOD = env(
    "HOROVOD_HOSTNAME=b HOROVOD_RANK=5 HOROVOD_SIZE=8 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=4"
    " HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2 HOROVOD_GLOO_RENDEZVOUS_ADDR=198.51.100.1"
    " HOROVOD_GLOO_RENDEZVOUS_PORT=41000 HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo"
    " HOROVOD_GLOO_IFACE=eth0 NCCL_SOCKET_IFNAME=eth0"
)
LEFT_BY_HOROVOD = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "x", "HOROVOD_GLOO_RENDEZVOUS_PORT": "x"}
HOROVOD_PORT = 61440 + 41000 % 4095
# a batch script's, after `env | grep SLURM` of a public job of 4 nodes x 1 task: no SLURM_STEP_*
BATCH_SCRIPT = env(
    "SLURM_JOB_ID=200505 SLURM_JOB_NODELIST=gnode[10,20,25,37] SLURM_NODELIST=gnode[10,20,25,37]"
    " SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_TASKS_PER_NODE=1(x4) SLURM_PROCID=0 SLURM_LOCALID=0"
    " SLURM_NODEID=0"
)
# srun(1), "OUTPUT ENVIRONMENT VARIABLES": 3 nodes with 2, 2 and 1 tasks
SRUN = BATCH_SCRIPT | env(
    "SLURM_STEP_ID=2 SLURM_STEP_NODELIST=gnode[20,25,37] SLURM_STEP_NUM_TASKS=5"
    " SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_NTASKS=5 SLURM_PROCID=3 SLURM_LOCALID=1"
    " SLURM_NODEID=1"
)
SRUN_PORT = 61440 + 200507 % 4095
HOST_FILE = SRUN | env(
    "SLURM_STEP_NODELIST=compute-permanent-node-[583,752,801,869] SLURM_STEP_NUM_NODES=4"
    " SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=1(x4) SLURM_DISTRIBUTION=arbitrary"
    " SLURM_PROCID=0 SLURM_NODEID=2 SLURM_LOCALID=0"
)
# each of the eight tasks of a node starts torchrun with eight, as in TRI-ML/prismatic-vlms #39
EIGHT_TASKS = {**SRUN, **TORCHRUN, **env("SLURM_STEP_TASKS_PER_NODE=8(x2) LOCAL_RANK=5 LOCAL_WORLD_SIZE=8")}
ASCEND = env("RANK_ID=9 RANK_SIZE=16")
CONTAINER = env("RANK_ID=0 RANK_SIZE=1 DEVICE_ID=5")
OF_A_CONTAINER = "RANK_ID=0, but neither RANK_SIZE nor RANK_TABLE_FILE is set: assuming a run of one process"
TABLE = "v0_modelarts_k8s_jobstart_2x8_unordered.json"
BY_TORCHRUN = process(5, 8, 1, 4, "10.0.0.1", 29501, "torchrun")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, BY_TORCHRUN),
        # deepspeed/launcher/launch.py of DeepSpeed 0.19
        ({**RANKS, **env("LOCAL_SIZE=4 CROSS_RANK=1 CROSS_SIZE=2")}, BY_TORCHRUN),
        # the container's, not the rank's
        ({**TORCHRUN, "DEVICE_ID": "6"}, BY_TORCHRUN),
        (
            {**TORCHRUN, **env("DEVICE_ID=6 RANK_ID=5 RANK_SIZE=8 GPT2_LAUNCHER_PID=77")},
            process(5, 8, 1, 4, "10.0.0.1", 29501, "launch", device_id=6),
        ),
        ({**ONE, **CONTAINER, "TORCHELASTIC_RUN_ID": "none"}, process(0, 1, 0, 1, "a", 29501, "torchrun")),
        # ours, printed by a dry run and started by hand
        ({**ONE, **CONTAINER}, process(0, 1, 0, 1, "a", 29501, "launch", device_id=5)),
        (MSRUN, process(3, 4, 3, 4, "127.0.0.1", 8118, "msrun", device_id=3)),
        (
            {**MSRUN, "MS_SCHED_HOST": "10.0.0.1", "DEVICE_ID": "1"},
            process(3, 4, 1, 2, "10.0.0.1", 8118, "msrun", device_id=1),
        ),
        (OPEN_MPI, process(1, 2, 1, 2, "127.0.0.1", 29500, "mpirun")),
        (
            {**OPEN_MPI, **MPI_ALONE, "MASTER_ADDR": "a", "MASTER_PORT": "1234"},
            process(1, 2, 0, 1, "a", 1234, "mpirun"),
        ),
        (HOROVOD, process(5, 8, 1, 4, "198.51.100.1", HOROVOD_PORT, "horovodrun")),
        (
            {**HOROVOD, **env("HOROVOD_SIZE=6 HOROVOD_LOCAL_RANK=5 HOROVOD_LOCAL_SIZE=6")},
            process(5, 6, 5, 6, "127.0.0.1", HOROVOD_PORT, "horovodrun"),
        ),
        (BATCH_SCRIPT, ALONE),
        # the batch step's own number
        ({**BATCH_SCRIPT, **env("SLURM_STEP_ID=4294967291 SLURM_STEP_NODELIST=gnode10")}, ALONE),
        (SRUN, process(3, 5, 1, 2, "gnode20", SRUN_PORT, "srun")),
        # srun --mpi=pmi2
        ({**SRUN, **env("PMI_RANK=3 PMI_SIZE=5")}, process(3, 5, 1, 2, "gnode20", SRUN_PORT, "srun")),
        ({**SRUN, **OPEN_MPI}, process(1, 2, 1, 2, "127.0.0.1", 29500, "mpirun")),
        (
            env("MA_NUM_HOSTS=2 VC_WORKER_HOSTS=job-0.job,job-1.job ASCEND_DEVICE_ID=1", **ASCEND),
            process(9, 16, 1, 8, "job-0.job", 29500, "rank table", device_id=1),
        ),
        (env("RANK_ID=0 DEVICE_ID=3"), Process(device_id=3, remarks=(OF_A_CONTAINER,))),
        # left over from something else, whatever they hold
        (env("DEVICE_ID=abc"), ALONE),
        (env("PMI_RANK=0 PMI_SIZE=1"), ALONE),
    ],
)
def test_every_launcher(environ: dict[str, str], expected: Process) -> None:
    assert find_process(environ) == expected


def test_ranks_of_msrun_on_several_hosts_share_their_memory_alike() -> None:
    """Each knows its number on its host, but not how many there are: a plan by it would differ."""
    far = {**MSRUN, "MS_SCHED_HOST": "10.0.0.1"}
    ranks = [find_process(far | env(f"MS_NODE_ID={n} DEVICE_ID={n % 2}")) for n in range(4)]
    assert [process.local_world_size for process in ranks] == [1, 2, 1, 2]
    assert [process.most_here for process in ranks] == [4] * 4
    assert find_process(TORCHRUN).most_here == 4


def test_a_rank_table_says_what_the_variables_do_not(samples: Path) -> None:
    """Pods are listed 1, 0; rank 9 is the second device of pod 1, on 10.19.1.79, and rank 0 lies on
    pod 0's 10.19.1.142.
    """
    table = str(samples / TABLE)
    expected = process(9, 16, 1, 8, "10.19.1.142", 29500, "rank table", device_id=1)
    assert find_process({"RANK_TABLE_FILE": table, "RANK_ID": "9"}) == expected
    assert find_process({"RANK_TABLE_FILE": table, **ASCEND, "DEVICE_ID": "1"}) == expected
    assert announced_world_size({"RANK_TABLE_FILE": table}) == 16
    assert announced_world_size(env("RANK_ID=0 DEVICE_ID=3")) is None
    with pytest.raises(ConfigError, match=r"the ranks in RANK_TABLE_FILE differ: 8, 16; make"):
        announced_world_size({"RANK_TABLE_FILE": table, "RANK_SIZE": "8"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (env("RANK=0"), "RANK=0, but WORLD_SIZE is not set; set both, or unset RANK"),
        (env("WORLD_SIZE=2"), "WORLD_SIZE=2, but RANK is not set; set both"),
        (env("WORLD_SIZE=many"), "WORLD_SIZE=many: expected the number of processes"),
        (env("RANK=-1 WORLD_SIZE=2"), "RANK=-1: expected a number, 0 or more"),
        (env("RANK=2 WORLD_SIZE=2"), "RANK=2, but there are 2 processes: expected 0 to 1"),
        (
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "rank 4 on this host (LOCAL_RANK) of 4 (LOCAL_WORLD_SIZE), of 8 in total: these",
        ),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, "of 16 (LOCAL_WORLD_SIZE), of 8 in total: these"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000: expected 1 to 65535"),
        (env("RANK_ID=1"), "RANK_ID=1, but RANK_SIZE is not set; set both"),
        (env("RANK_ID=0 MA_NUM_HOSTS=2"), "RANK_ID=0, but RANK_SIZE is not set; set both"),
        ({**MSRUN, "MS_NODE_ID": ""}, "MS_NODE_ID is not set; give msrun --node_rank"),
        ({**MSRUN, "MS_WORKER_NUM": ""}, "MS_WORKER_NUM is not set: expected the number of"),
        (OPEN_MPI | MPI_ALONE, "mpirun -x MASTER_ADDR=HOST_OF_RANK_0"),
        (env("PMI_RANK=1 PMI_SIZE=2"), "PMI_SIZE=2, but not which of these processes this one is"),
        (env("MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=4"), "unset MV2_COMM_WORLD_SIZE for one"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": ""},
            "OMPI_COMM_WORLD_SIZE=2, but not which of these processes this one is on its host;"
            " start them with Open MPI's mpirun, srun or torchrun, or unset OMPI_COMM_WORLD_SIZE",
        ),
        ({**HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_ADDR": ""}, "set MASTER_ADDR to the address"),
        (OPEN_MPI | MPI_ALONE | LEFT_BY_HOROVOD, "1 of them here, and MASTER_ADDR is not set"),
        (
            {**HOROVOD, "RANK": "0", "WORLD_SIZE": "8"},
            "RANK=0 of WORLD_SIZE=8, but HOROVOD_RANK=5 of HOROVOD_SIZE=8; unset RANK",
        ),
        ({**HOROVOD, "HOROVOD_LOCAL_SIZE": ""}, "HOROVOD_LOCAL_SIZE is not set"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID=x: expected a number"),
        # rank 0 on the third node of the sorted list, as in Lightning-AI/pytorch-lightning #17228
        ({**HOST_FILE, "SLURM_DISTRIBUTION": "cyclic"}, "set MASTER_ADDR to the node of rank 0"),
        ({**HOST_FILE, "SLURM_PROCID": "2"}, "set MASTER_ADDR to the node of rank 0"),
        (
            {**EIGHT_TASKS, "WORLD_SIZE": "16"},
            "srun has started 8 tasks on this node, and each of them a torchrun with 8 processes,"
            " 64 for a run of 16; give srun --ntasks-per-node=1",
        ),
        ({**SRUN, "SLURM_STEP_NODELIST": "[3"}, "SLURM_STEP_NODELIST=[3: expected names such as"),
        (env("RANK_TABLE_FILE=TABLE"), "holds 16 ranks, but RANK_ID is not set"),
        (env("RANK_TABLE_FILE=TABLE RANK_ID=16"), "RANK_ID=16, but there are 16 processes"),
        (env("RANK_TABLE_FILE=TABLE RANK_ID=0 RANK_SIZE=8"), "RANK_SIZE=8, but RANK_TABLE_FILE="),
    ],
)
def test_impossible_values_are_refused(samples: Path, environ: dict[str, str], message: str) -> None:
    found = {name: value.replace("TABLE", str(samples / TABLE)) for name, value in environ.items()}
    with pytest.raises(ConfigError) as caught:
        find_process(found)
    assert message in str(caught.value) and str(caught.value).startswith("environment: ")


def test_a_host_file_does_not_matter_where_the_node_of_rank_0_is_known() -> None:
    assert find_process({**HOST_FILE, "MASTER_ADDR": "node-801"}).master == "node-801"
    one = {**HOST_FILE, "SLURM_STEP_NODELIST": "gpu3", "SLURM_STEP_NUM_NODES": "1"}
    assert find_process({**one, "SLURM_NODEID": "0"}).master == "gpu3"


def test_tasks_with_a_torchrun_each_may_be_separate_runs() -> None:
    (remark,) = find_process(EIGHT_TASKS).remarks
    assert "each of them a torchrun with 8 processes, 64 for a run of 8" in remark
    shares = {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert find_process({**EIGHT_TASKS, **shares, "WORLD_SIZE": "16"}).remarks == ()
    one_each = {**EIGHT_TASKS, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "WORLD_SIZE": "16"}
    assert find_process(one_each).remarks == ()


def test_the_first_node_of_slurms_notation() -> None:
    """Against the meaning in scontrol(1), "show hostnames"."""
    first = {"gpu03": "gpu03", "gpu[03-05,9],login1": "gpu03", "login1,gpu[03-05]": "login1"}
    first |= {"rack[1-2]node[03-04]": "rack1node03", "tux-[001-128].cluster": "tux-001.cluster"}
    assert {nodes: first_node(nodes) for nodes in first} == first


def test_variables_for_torch() -> None:
    assert torch_variables(find_process(TORCHRUN)) == {
        name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")
    }
    with pytest.raises(ConfigError, match="rank 1 of 2 does not know where to meet the others; set MASTER_ADDR"):
        torch_variables(Process(rank=1, world_size=2))

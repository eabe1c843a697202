"""Rank of a process from the variables of every launcher, whole and damaged."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from common.cluster.environment import Process, announced_world_size, find_process, first_node, torch_variables
from common.errors import ConfigError

REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
VARIABLES = {
    "RANKS": "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29501",
    "TORCHRUN": "RANKS LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none",
    # ours, printed by a dry run and started by hand in a container with one device
    "OURS": "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=29501"
    " RANK_ID=0 RANK_SIZE=1 DEVICE_ID=5",
    # as msrun of MindSpore 2.10 sets them: mindspore/parallel/cluster/process_entity/_api.py
    "MSRUN": "MS_ROLE=MS_WORKER MS_NODE_ID=3 MS_WORKER_NUM=4 MS_SCHED_HOST=127.0.0.1 MS_SCHED_PORT=8118"
    " MS_TOPO_TIMEOUT=600 RANK_ID=3 RANK_SIZE=4 DEVICE_ID=3",
    # mpirun(1) of Open MPI 4, "Environment Variables"
    "OPEN_MPI": "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1"
    " OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=1",
    "MPI_ALONE": "OPEN_MPI OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1",
    # horovodrun --gloo: create_slot_env_vars and create_run_envs of horovod/runner/gloo_run.py, 0.28
    "HOROVOD": "HOROVOD_HOSTNAME=b HOROVOD_RANK=5 HOROVOD_SIZE=8 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=4"
    " HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2 HOROVOD_GLOO_RENDEZVOUS_ADDR=198.51.100.1"
    " HOROVOD_GLOO_RENDEZVOUS_PORT=41000 HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo"
    " HOROVOD_GLOO_IFACE=eth0 NCCL_SOCKET_IFNAME=eth0",
    # a batch script's, after `env | grep SLURM` of a public job of 4 nodes x 1 task: no SLURM_STEP_*
    "BATCH_SCRIPT": "SLURM_JOB_ID=200505 SLURM_JOB_NODELIST=gnode[10,20,25,37] SLURM_NODELIST=gnode[10,20,25,37]"
    " SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_TASKS_PER_NODE=1(x4) SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
    # srun(1), "OUTPUT ENVIRONMENT VARIABLES": 3 nodes with 2, 2 and 1 tasks
    "SRUN": "BATCH_SCRIPT SLURM_STEP_ID=2 SLURM_STEP_NODELIST=gnode[20,25,37] SLURM_STEP_NUM_TASKS=5"
    " SLURM_STEP_TASKS_PER_NODE=2(x2),1 SLURM_NTASKS=5 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1",
    # rank 0 on the third node of the sorted list, as in Lightning-AI/pytorch-lightning #17228
    "HOST_FILE": "SRUN SLURM_STEP_NODELIST=compute-permanent-node-[583,752,801,869] SLURM_STEP_NUM_NODES=4"
    " SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=1(x4) SLURM_DISTRIBUTION=arbitrary"
    " SLURM_PROCID=0 SLURM_NODEID=2 SLURM_LOCALID=0",
    # each of the eight tasks of a node starts torchrun with eight, as in TRI-ML/prismatic-vlms #39
    "EIGHT_TASKS": "SRUN TORCHRUN SLURM_STEP_TASKS_PER_NODE=8(x2) LOCAL_RANK=5 LOCAL_WORLD_SIZE=8",
    "TABLE": "RANK_TABLE_FILE=v0_modelarts_k8s_jobstart_2x8_unordered.json",
}
"""Variables of launchers; a name without a value stands for all of that launcher's."""


def env(text: str) -> dict[str, str]:
    """Return the variables of a text such as ``TORCHRUN LOCAL_RANK=2``."""
    found: dict[str, str] = {}
    for word in text.split():
        name, mark, value = word.partition("=")
        found |= {name: value} if mark else env(VARIABLES[name])
    return found


def process(text: str) -> Process:
    """Return the process of its fields in their order, from its rank to its device."""
    values = {name: int(word) if word.isdigit() else word for name, word in zip(FIELDS, text.split(), strict=False)}
    return Process(**values)  # type: ignore[arg-type]


FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "master", "port", "launcher", "device_id")
GLOO, SRUN_PORT = 61440 + 41000 % 4095, 61440 + 200507 % 4095


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", ""),
        ("TORCHRUN", "5 8 1 4 10.0.0.1 29501 torchrun"),
        # deepspeed/launcher/launch.py of DeepSpeed 0.19
        ("RANKS LOCAL_SIZE=4 CROSS_RANK=1 CROSS_SIZE=2", "5 8 1 4 10.0.0.1 29501 torchrun"),
        ("TORCHRUN DEVICE_ID=6", "5 8 1 4 10.0.0.1 29501 torchrun"),  # the container's, not the rank's
        ("TORCHRUN DEVICE_ID=6 RANK_ID=5 RANK_SIZE=8 GPT2_LAUNCHER_PID=77", "5 8 1 4 10.0.0.1 29501 launch 6"),
        ("OURS TORCHELASTIC_RUN_ID=none", "0 1 0 1 a 29501 torchrun"),
        ("OURS", "0 1 0 1 a 29501 launch 5"),
        ("MSRUN", "3 4 3 4 127.0.0.1 8118 msrun 3"),
        ("MSRUN MS_SCHED_HOST=10.0.0.1 DEVICE_ID=1", "3 4 1 2 10.0.0.1 8118 msrun 1"),
        ("OPEN_MPI", "1 2 1 2 127.0.0.1 29500 mpirun"),
        ("MPI_ALONE MASTER_ADDR=a MASTER_PORT=1234", "1 2 0 1 a 1234 mpirun"),
        ("HOROVOD", f"5 8 1 4 198.51.100.1 {GLOO} horovodrun"),
        ("HOROVOD HOROVOD_SIZE=6 HOROVOD_LOCAL_RANK=5 HOROVOD_LOCAL_SIZE=6", f"5 6 5 6 127.0.0.1 {GLOO} horovodrun"),
        ("BATCH_SCRIPT", ""),
        # the batch step's own number
        ("BATCH_SCRIPT SLURM_STEP_ID=4294967291 SLURM_STEP_NODELIST=gnode10", ""),
        ("SRUN PMI_RANK=3 PMI_SIZE=5", f"3 5 1 2 gnode20 {SRUN_PORT} srun"),  # --mpi=pmi2
        ("SRUN OPEN_MPI", "1 2 1 2 127.0.0.1 29500 mpirun"),
        (
            "MA_NUM_HOSTS=2 VC_WORKER_HOSTS=a,b ASCEND_DEVICE_ID=1 RANK_ID=9 RANK_SIZE=16",
            "9 16 1 8 a 29500 rank_table 1",
        ),
        # left over from something else, whatever they hold
        ("DEVICE_ID=abc PMI_RANK=0 PMI_SIZE=1", ""),
    ],
)
def test_every_launcher(variables: str, expected: str) -> None:
    found = find_process(env(variables))
    assert replace(found, launcher=found.launcher.replace(" ", "_")) == process(expected)


def test_ranks_of_msrun_on_several_hosts_share_their_memory_alike() -> None:
    """Each knows its number on its host, but not how many there are: a plan by it would differ."""
    ranks = [find_process(env(f"MSRUN MS_SCHED_HOST=10.0.0.1 MS_NODE_ID={n} DEVICE_ID={n % 2}")) for n in range(4)]
    assert [process.local_world_size for process in ranks] == [1, 2, 1, 2]
    assert [process.most_here for process in ranks] == [4] * 4
    assert find_process(env("TORCHRUN")).most_here == 4


def test_a_rank_table_says_what_the_variables_do_not(samples: Path) -> None:
    """Pods are listed 1, 0; rank 9 is the second device of pod 1, on 10.19.1.79, and rank 0 lies on
    pod 0's 10.19.1.142.
    """
    table = {"RANK_TABLE_FILE": str(samples / env("TABLE")["RANK_TABLE_FILE"])}
    expected = replace(process("9 16 1 8 10.19.1.142 29500 - 1"), launcher="rank table")
    assert find_process(table | env("RANK_ID=9")) == expected
    assert find_process(table | env("RANK_ID=9 RANK_SIZE=16 DEVICE_ID=1")) == expected
    assert announced_world_size(table) == 16
    container = env("RANK_ID=0 DEVICE_ID=3")
    (remark,) = find_process(container).remarks
    assert remark == "RANK_ID=0, but neither RANK_SIZE nor RANK_TABLE_FILE is set: assuming a run of one process"
    assert find_process(container) == Process(device_id=3, remarks=(remark,))
    assert announced_world_size(container) is None
    with pytest.raises(ConfigError, match=r"the ranks in RANK_TABLE_FILE differ: 8, 16; make"):
        announced_world_size(table | env("RANK_SIZE=8"))


@pytest.mark.parametrize(("variables", "message"), REFUSALS["environment"])
def test_impossible_values_are_refused(samples: Path, variables: str, message: str) -> None:
    environ = env(variables)
    if "RANK_TABLE_FILE" in environ:
        environ["RANK_TABLE_FILE"] = str(samples / environ["RANK_TABLE_FILE"])
    with pytest.raises(ConfigError) as caught:
        find_process(environ)
    assert message in str(caught.value) and str(caught.value).startswith("environment: ")


def test_a_host_file_does_not_matter_where_the_node_of_rank_0_is_known() -> None:
    assert find_process(env("HOST_FILE MASTER_ADDR=node-801")).master == "node-801"
    one = "HOST_FILE SLURM_STEP_NODELIST=gpu3 SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0"
    assert find_process(env(one)).master == "gpu3"


def test_tasks_with_a_torchrun_each_may_be_separate_runs() -> None:
    (remark,) = find_process(env("EIGHT_TASKS")).remarks
    assert "each of them a torchrun with 8 processes, 64 for a run of 8" in remark
    for shares in ("2(x2) LOCAL_WORLD_SIZE=4 LOCAL_RANK=1", "1(x2)"):
        assert find_process(env(f"EIGHT_TASKS WORLD_SIZE=16 SLURM_STEP_TASKS_PER_NODE={shares}")).remarks == ()


def test_the_first_node_of_slurms_notation() -> None:
    """Against the meaning in scontrol(1), "show hostnames"."""
    first = {"gpu03": "gpu03", "gpu[03-05,9],login1": "gpu03", "login1,gpu[03-05]": "login1"}
    first |= {"rack[1-2]node[03-04]": "rack1node03", "tux-[001-128].cluster": "tux-001.cluster"}
    assert {nodes: first_node(nodes) for nodes in first} == first


def test_variables_for_torch() -> None:
    assert torch_variables(find_process(env("TORCHRUN"))) == env("RANKS LOCAL_WORLD_SIZE=4")
    with pytest.raises(ConfigError, match="rank 1 of 2 does not know where to meet the others; set MASTER_ADDR"):
        torch_variables(Process(rank=1, world_size=2))

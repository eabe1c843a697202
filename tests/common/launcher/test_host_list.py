"""Parts of a run that the hosts of a list start. A system test compares them with what each host then starts."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.cluster.places import RankPlacement, places_of_table
from common.cluster.rank_table_files import read_table
from common.errors import ConfigError
from common.launcher.host_list import divide, host_command, parse_hosts
from common.launcher.nodes import settle_nodes
from common.launcher.request import LaunchRequest
from tests.cluster_tables import write_tutorial_table

ADDRESSES = [f"10.155.111.{140 + server}" for server in range(4)]


@pytest.fixture
def table(tmp_path: Path) -> tuple[RankPlacement, ...]:
    return places_of_table(read_table(write_tutorial_table(tmp_path / "table.json")))


def parts(
    hosts: str, numbers: range, rank_size: int | None, table: tuple[RankPlacement, ...] = (), master: str | None = None
) -> list[tuple[str, Sequence[int], tuple[str, ...]]]:
    return divide(parse_hosts(hosts), numbers, rank_size=rank_size, table=table, master=master, port=29500)


def test_addresses_of_the_table_are_matched_and_names_follow_its_order(table: tuple[RankPlacement, ...]) -> None:
    addresses = ["me@" + ADDRESSES[3], ADDRESSES[1], ADDRESSES[0], ADDRESSES[2]]
    for hosts, order in (
        (["d", "c", "b", "me@a"], ["d", "c", "b", "me@a"]),
        (addresses, [*ADDRESSES[:3], "me@" + ADDRESSES[3]]),
    ):
        assert parts(",".join(hosts), range(32), 32, table) == [
            (host, range(8 * n, 8 * n + 8), ()) for n, host in enumerate(order)
        ]


def test_without_a_table_the_first_host_is_the_master() -> None:
    devices = parts("me@a,b", range(4, 8), None)
    assert [part[1:] for part in devices] == [
        (range(4, 8), ("--master", "a:29500", "--nnodes", "2", "--node_rank", str(node))) for node in (0, 1)
    ]
    ranks = parts("fd00::1,fd00::2", range(8), 8)
    assert [part[1:] for part in ranks] == [(range(4 * k, 4 * k + 4), ("--master", "[fd00::1]:29500")) for k in (0, 1)]
    assert parts("a,b", range(8), 8, master="10.0.0.9")[1][2] == ("--master", "10.0.0.9:29500")
    assert parts("a", range(8), 8) == [("a", range(8), ())]


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a,a", "-oProxyCommand=x", "a b", "a\nb", "me@a:2", "10.0.0.1:22", "[fd00::1]"]
)
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--hosts .*(slots: the range says how|is there twice)"):
        parse_hosts("x," + text)


@pytest.mark.parametrize(
    ("hosts", "ranks", "size", "message"),
    [
        ("a,b", 32, 32, "these are 2 hosts, but the rank table has the 4 servers"),
        (",".join([*ADDRESSES[:3], "10.0.0.1"]), 32, 32, "10.0.0.1: these are 4 hosts"),
        ("a,b,c,d", 8, None, r"needs all its ranks and RANK_SIZE: '\[0,32\)' MODE 32"),
        ("a,b", 9, 9, r"give all ranks, '\[0,9\)', as many on each host"),
        ("a,b", 4, 8, r"give all ranks, '\[0,8\)'"),
    ],
)
def test_lists_that_do_not_fit(
    table: tuple[RankPlacement, ...], hosts: str, ranks: int, size: int | None, message: str
) -> None:
    """The last two are without a table."""
    with pytest.raises(ConfigError, match=message):
        parts(hosts, range(ranks), size, () if size in (8, 9) else table)


def test_a_server_without_a_range_of_ranks(table: tuple[RankPlacement, ...]) -> None:
    """Its ranks alternate with those of the next one."""
    swapped = [(0, table[0]), (1, table[8]), (2, table[1]), (3, table[9])]
    places = tuple(replace(place, rank=rank) for rank, place in swapped)
    said = rf"the ranks of {ADDRESSES[0]} in the rank table are not a range; .*merge_hccl\.py"
    with pytest.raises(ConfigError, match=said):
        parts("a,b", range(4), 4, places)


def test_settings_of_network_and_memory_reach_every_host() -> None:
    given = {
        **{"NCCL_IB_HCA": "mlx5", "HCCL_BUFFSIZE": "200", "TASK_QUEUE_ENABLE": "2"},
        **{"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "MASTER_PORT": "4000"},
    }
    others = {"NCCL_HOSTID": "7", "NCCL_DEBUG": "", "HCCL_IF_IP": "10.0.0.1", "SECRET_KEY": "x"}
    text = host_command(["none", "it's"], {**given, **others})
    assert [word for word in text.split() if "=" in word and not word.startswith("PYTHON=")] == [
        f"{name}={given[name]}" for name in sorted(given)
    ]
    assert text.endswith("""/scripts/run_distribute.sh none 'it'"'"'s'""")


# ---- hosts that a step of Slurm tells ----

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "MASTER_PORT": "29512",
}
"""Variables that srun(1) lists, of the second of two tasks on two nodes."""
REQUEST = LaunchRequest(argv=(), config=Path("run.yaml"), mode="train", numbers=range(8), overrides=())


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_SIZE", "PET_")):
            monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


def test_a_step_tells_its_hosts_with_one_task_a_node_unless_the_command_does(
    step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settle_nodes(REQUEST, meet=True)
    assert (found.nnodes, found.node_rank, found.master) == (2, 1, "gpu03:29512")
    given = replace(REQUEST, master="10.0.0.1:29500", nnodes=4, node_rank=3)
    assert settle_nodes(given, meet=True) == given
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert settle_nodes(REQUEST, meet=True) == REQUEST, "one task is a shell of srun --pty"
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    with pytest.raises(ConfigError, match=r"started 4 tasks on this node.*--ntasks-per-node=1"):
        settle_nodes(REQUEST, meet=True)

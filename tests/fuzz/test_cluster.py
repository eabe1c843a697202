"""Clusters: rank tables and the variables of launchers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import example, given, strategies as st

from common.cluster.environment import announced_world_size, find_process, torch_variables
from common.cluster.places import places_of_table
from common.cluster.rank_environment import given_port
from common.cluster.rank_table import RankTable, table_warnings
from common.cluster.rank_table_files import read_table, to_json as table_to_json
from tests.cluster_tables import sample_tables, table_1, tutorial_servers
from tests.fuzz.faults import FAULTS, TREE_FAULTS, Fault, changed_tree, spoil, to_json, write

# ---- rank tables ----


WHOLE = {"1.0 2x2": table_1(*tutorial_servers(2, 2))} | sample_tables()
NAMES = st.sampled_from(list(WHOLE))
SOME_FAULTS = st.lists(TREE_FAULTS, max_size=3)


def use(path: Path) -> RankTable:
    """Do what launchers and tools do with a table. It has ranks 0 to n - 1, each once, devices and
    addresses once, and the same where it is written and read again.
    """
    table = read_table(path)
    ranks = [place.rank for place in places_of_table(table)]
    assert sorted(ranks) == list(range(table.world_size))
    held = [(server.server_id, device.device_id) for server, device in table.places()]
    addresses = [device.device_ip for _, device in table.places() if device.device_ip]
    assert len(set(addresses)) == len(addresses)
    table_warnings(table)
    if table.version != "2.0":  # where a server is a network instance, which may span machines
        assert len(set(held)) == len(held)
        again = write(path.with_name("again.json"), json.dumps(table_to_json(table)))
        assert [place.rank for place in places_of_table(read_table(again))] == ranks
    return table


def require_same_as_json(path: Path, table: RankTable) -> None:
    """Ranks, devices, addresses and servers are those of the json module's reading, as far as it names them."""
    there = [*_listed(json.loads(path.read_text(encoding="utf-8-sig")))]
    found = [(d.rank_id, d.device_id, d.device_ip, s.server_id) for s, d in table.places()]
    named = [n for n in range(4) if any(row[n] is not None for row in there)]
    assert {tuple(row[n] for n in named) for row in found} == {tuple(row[n] for n in named) for row in there}


def _listed(tree: Any, server: str | None = None) -> Iterator[tuple[Any, ...]]:
    """Yield rank, device, address and server of everything with a device."""
    if isinstance(tree, dict):
        server = tree.get("server_id", server)
        if "device_id" in tree:
            numbers = (int(tree[key]) if key in tree else None for key in ("rank_id", "device_id"))
            yield *numbers, tree.get("device_ip", "").strip() or None, server and server.strip()
    for below in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _listed(below, server)


@given(name=NAMES, faults=SOME_FAULTS, of_file=st.one_of(st.none(), st.none(), FAULTS))
@example(name="1.0 2x2", faults=[Fault("nearby value", 53, 1)], of_file=None)  # a rank twice
@example(name="1.0 2x2", faults=[Fault("value", 3, 0, "\u0663")], of_file=None)
def test_a_table_with_faults(judge, name, faults, of_file) -> None:
    with judge.folder() as folder:
        path = write(folder / "table.json", to_json(changed_tree(WHOLE[name], *faults)))
        spoil(path, of_file)
        with judge(str(path)):
            table = use(path)
            require_same_as_json(path, table)


# ---- environment variables ----

FAMILIES = [
    dict(pair.split("=", 1) for pair in line.split())
    for line in """
RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=x
RANK=1 WORLD_SIZE=4 RANK_ID=1 RANK_SIZE=4 DEVICE_ID=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GPT2_LAUNCHER_PID=5
MS_ROLE=MS_WORKER MS_WORKER_NUM=4 MS_NODE_ID=1 DEVICE_ID=1 MS_SCHED_HOST=127.0.0.1 MS_SCHED_PORT=8118
MS_ROLE=MS_SCHED MS_WORKER_NUM=4 MS_SCHED_HOST=127.0.0.1 MS_SCHED_PORT=8118
RANK_ID=1 RANK_SIZE=4 DEVICE_ID=1 ASCEND_DEVICE_ID=1
RANK_ID=0 DEVICE_ID=0 MA_NUM_HOSTS=1
OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4
PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=a
SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4 SLURM_STEP_NODELIST=gpu[03-05,9],login1 SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NODEID=0 SLURM_LOCALID=1 SLURM_JOB_ID=123
RANK_TABLE_FILE=TABLE RANK_ID=1 RANK_SIZE=4 DEVICE_ID=1 HCCL_CONNECT_TIMEOUT=0
""".strip().splitlines()  # noqa: E501
]
ODD = (
    "", " ", "-1", "0", "1", "3", "4", "5", "64", "99999999999", "9" * 5000, "1.0", "1e3", "0x4",
    "+1", " 1", "1 ", "\u0663", "\u00b2", "abc", "a b", "[", "]", "gpu[", "gpu[1-", "[1-2]",
    "gpu[1-3],", ",", "a,b", "4(x", "2(x3)", "4(x99999999999)", "127.0.0.1", "::1", "a:b",
    "MS_SCHED", "x" * 5000, "4294967280", "65535", "65536", "\u202e",
)  # fmt: skip
ADDED = ("MASTER_PORT", "MASTER_ADDR", "RANK_ID", "MS_ROLE", "WORLD_SIZE", "RANK")


def _environments() -> st.SearchStrategy[dict[str, str]]:
    families = st.sampled_from(FAMILIES)

    def changed(environ: dict[str, str]) -> st.SearchStrategy[dict[str, str]]:
        name = st.sampled_from([*environ, *environ, *ADDED])
        changes = st.dictionaries(name, st.none() | st.sampled_from(ODD), max_size=3)
        return changes.map(lambda new: {
            key: value for key, value in (environ | new).items() if value is not None
        })  # fmt: skip

    both = st.builds(lambda one, two: one | two, families, families)
    return st.one_of(families, families, both).flatmap(changed)


@given(environ=_environments(), table=st.one_of(st.just([]), SOME_FAULTS))
@example(environ=FAMILIES[2] | {"MS_SCHED_PORT": "65536"}, table=[])
@example(environ=FAMILIES[0] | {"RANK": "4"}, table=[])
@example(environ=FAMILIES[0] | {"WORLD_SIZE": "\u0663"}, table=[])
def test_variables_of_launchers(judge, environ, table) -> None:
    with judge.folder() as folder:
        names = [*environ, "environment: ", f"{environ.get('RANK_TABLE_FILE', '?')}: ", str(folder)]
        if environ.get("RANK_TABLE_FILE") == "TABLE":
            path = write(folder / "table.json", to_json(changed_tree(WHOLE["1.0 2x2"], *table)))
            environ = environ | {"RANK_TABLE_FILE": str(path)}
        with judge(*names):
            given_port(environ)
            announced_world_size(environ)
            process = find_process(environ)
            torch_variables(process)
            assert 0 <= process.rank < process.world_size
            assert 0 <= process.local_rank < process.local_world_size <= process.world_size
            assert process.port is None or 0 < process.port < 65536
            assert process.master is None or re.fullmatch(r"[^\[\], ]+", process.master)
            port = environ.get("MASTER_PORT", "")
            assert not port or (port.isascii() and port.isdigit()), "which was taken"

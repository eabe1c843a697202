"""Ranges and places, against the numbers of the tutorial of MindFormers' run_distribute.sh."""

from pathlib import Path
from typing import Any

import pytest

from common.cluster.places import RankPlacement, find_places, parse_range
from common.cluster.rank_table import RankTable
from common.cluster.rank_table_files import read_table
from common.errors import ConfigError
from tests.cluster_tables import write_tutorial_table


@pytest.fixture
def tutorial(tmp_path: Path) -> RankTable:
    return read_table(write_tutorial_table(tmp_path / "hccl_4s_32p.json"))


@pytest.mark.parametrize("text", ["[8,16)", "[8,16]", " [ 8 , 16 ) ", "[08,16]"])
def test_the_end_is_exclusive_however_it_is_written(text: str) -> None:
    assert list(parse_range(text)) == [8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a,8]", "start_device=a is not a number"),
        ("[0,b]", "end_device=b is not a number"),
        ("[٣,8]", "start_device=٣ is not a number"),
        ("[0.0,2)", "start_device=0.0 is not a number"),
        *((text, "expected a range such as '[0,8]'") for text in ("0", ",", "[8]", "(0,8)")),
        *((text, "an exclusive, greater end") for text in ("[8,0]", "[4,4)")),
        ("[0,1,4]", "for single devices give --devices 0,1,4"),
    ],
)
def test_a_range_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_range(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(("start", "end"), [(0, 8), (8, 16), (16, 24), (24, 32)])
def test_ranks_of_a_server_of_the_table(tutorial: RankTable, start: int, end: int) -> None:
    places = find_places(range(start, end), rank_size=32, table=tutorial)
    assert [(place.rank, place.device_id, place.local_rank) for place in places.own] == [
        (start + number, number, number) for number in range(8)
    ]
    assert places.own_host == f"10.155.111.{140 + start // 8}"
    assert (places.master, places.world_size) == ("10.155.111.140", 32)


def test_without_a_table() -> None:
    one = find_places(range(4, 6)).all
    assert [(place.rank, place.device_id) for place in one] == [(0, 4), (1, 5)]
    assert {place.host for place in one} == {"127.0.0.1"}
    several = find_places(range(4, 6), master="10.0.0.1", nodes=3, node_rank=2)
    assert several.own == (
        RankPlacement(rank=4, device_id=4, local_rank=0, host="node 2"),
        RankPlacement(rank=5, device_id=5, local_rank=1, host="node 2"),
    )
    assert several.world_size == 6 and several.hosts == ("10.0.0.1", "node 1", "node 2")
    by_ranks = find_places(range(8, 16), rank_size=32, master="10.0.0.1").own
    assert [(place.rank, place.device_id) for place in by_ranks] == [(8 + n, n) for n in range(8)]


def test_version_2_names_no_machines(samples: Path) -> None:
    table = read_table(samples / "v2.0_rank_list_950_2x2_ipv4.json")
    places = find_places(range(2, 4), rank_size=4, table=table, master="10.0.0.1")
    assert [place.rank for place in places.own] == [2, 3] and places.hosts == ("10.0.0.1", "node 1")
    with pytest.raises(ConfigError, match="--nnodes and --node_rank are for RANK_TABLE none"):
        find_places(range(2, 4), rank_size=4, table=table, nodes=2)


def test_a_range_of_devices_is_that_of_the_server_with_an_address_of_this_machine(
    tutorial: RankTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"10.155.111.142"}
    monkeypatch.setattr("common.cluster.places.is_here", own.__contains__)
    assert find_places(range(8), table=tutorial) == find_places(range(16, 24), rank_size=32, table=tutorial)
    remedy = r"devices 0-7; make a table .* with tools/hccl_tools.py --device_num '\[0,4\)'"
    with pytest.raises(ConfigError, match=rf"holds for 10\.155\.111\.142, {remedy}"):
        find_places(range(4), table=tutorial)
    own.add("10.155.111.140")
    with pytest.raises(ConfigError, match=r"10\.155\.111\.140 and 10\.155\.111\.142 has"):
        find_places(range(8), table=tutorial)


@pytest.mark.parametrize(
    ("numbers", "rank_size", "more", "message"),
    [
        (range(8), 16, None, "RANK_SIZE=16, but the rank table holds 32 ranks"),
        (range(8), None, None, "the rank table is of 4 servers, so the range must be of ranks"),
        (
            range(4, 12),
            32,
            None,
            "not those of one server of the rank table: 10.155.111.140 has 0-7; 10.155.111.141 has 8-15",
        ),
        (range(4), 32, None, "start all ranks of a server at once"),
        (range(24, 40), 32, None, r"the ranks \[24,40\) go past RANK_SIZE=32"),
        (range(8, 16), 16, {}, "2 hosts need a common address: give --master IP:PORT"),
        (range(8), 12, {}, "are not an equal part of RANK_SIZE=12"),
        (range(4, 12), 16, {}, "are not an equal part of RANK_SIZE=16"),
        (range(8, 16), 16, {"master": "a", "node_rank": 0}, "--node_rank 0, but .* make it 1"),
        (range(8), None, {"master": "a", "nodes": 2}, "--nnodes 2 needs --node_rank"),
        (range(8), None, {"master": "a", "nodes": 2, "node_rank": 2}, "is not among --nnodes 2"),
        (range(8), None, {"node_rank": 0}, "--node_rank 0 needs --nnodes"),
        (range(10**9), None, {}, "1000000000 ranks are more than"),
        (range(8), None, {"nodes": 10**8}, "800000000 ranks are more than"),
    ],
)
def test_ranges_that_contradict_the_table_or_each_other(
    tutorial: RankTable, numbers: range, rank_size: int | None, more: dict[str, Any] | None, message: str
) -> None:
    """more: None with the table."""
    with pytest.raises(ConfigError, match=message):
        find_places(numbers, rank_size=rank_size, table=tutorial if more is None else None, **(more or {}))

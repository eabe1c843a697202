"""Hosts of an attempt: spare ones, lost ones, and the same global batch on fewer ranks."""

from typing import Any

import pytest

from common.cluster.places import Placement, find_places
from common.cluster.rank_table import RankTable, Server, TableDevice, validate
from common.config.schema import RunConfig
from common.errors import ConfigError
from common.launcher.control import Host, Hosts
from common.launcher.elastic import HostChoice, hosts_of
from common.parallel.run import Run
from common.resolve.derive import resolve_config

BASE: dict[str, Any] = {
    "output_dir": "out",
    "model": {
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 4,
        "seq_length": 16,
        "vocab_size": 101,
    },
    "train": {"max_steps": 10, "micro_batch_size": 2},
    "optimizer": {"name": "sgd", "learning_rate": 0.1},
}


def places_of(count: int, each: int = 2) -> Placement:
    return find_places(range(each), master="10.0.0.1", nodes=count, node_rank=0)


def resolver(**sections: dict[str, Any]) -> Any:
    def run(overrides: Any, world_size: int) -> Run:
        values = {
            **BASE,
            **{name: {**BASE.get(name, {}), **part} for name, part in sections.items()},
        }
        for word in overrides:
            key, _, value = word.partition("=")
            section, name = key.split(".")
            values[section] = {
                **values.get(section, {}),
                name: None if value == "null" else int(value),
            }
        return resolve_config(RunConfig(**values), world_size=world_size)

    return run


def test_fewer_hosts_keep_the_global_batch_by_accumulation() -> None:
    choice = HostChoice(places_of(4), resolver(), 1)
    assert choice.choose([0, 1, 2, 3]) == (0, 1, 2, 3)
    full = choice.share((0, 1, 2, 3))
    assert full is not None and full.overrides == ()
    assert full.config.train.global_batch_size == 16
    # 16 samples do not divide by 3 hosts x 2 ranks x 2 samples, so one of three is a spare
    assert choice.choose([0, 2, 3]) == (0, 2)
    two = choice.share((0, 2))
    assert two is not None
    assert (two.config.train.global_batch_size, two.config.train.accumulation_steps) == (16, 2)
    assert [place.rank for place in two.places.all] == [0, 1, 2, 3]
    assert two.places.hosts == ("10.0.0.1", "node 2")
    one = choice.share((0,))
    assert one is not None and one.config.train.accumulation_steps == 4
    assert choice.is_better([0, 2], [3, 1]) and not choice.is_better([0, 2], [3])


def test_the_layout_of_a_model_limits_the_hosts() -> None:
    """Two stages of two hosts each cannot continue on one or three."""
    sections = {"parallel": {"model_parallel": 2, "pipeline_stage": 2}}
    choice = HostChoice(places_of(4), resolver(**sections), 1)
    assert choice.choose([0, 1, 3]) == (0, 1)
    assert choice.choose([0]) == ()


def test_a_given_size_makes_further_hosts_spares_that_take_over() -> None:
    choice = HostChoice(places_of(3), resolver(parallel={"data_parallel": 4}), 2)
    assert choice.nominal.places.world_size == 4
    assert choice.choose([0, 1, 2]) == (0, 1)
    assert choice.choose([0, 2]) == (0, 2)
    spare = choice.share((0, 2))
    assert spare is not None and spare.overrides == ()
    assert choice.choose([0]) == ()


def test_all_hosts_are_needed_without_a_minimum() -> None:
    choice = HostChoice(places_of(3), resolver(), None)
    assert choice.choose([0, 1]) == () and choice.choose([0, 1, 2]) == (0, 1, 2)


def test_impossible_minimum_and_layout() -> None:
    with pytest.raises(ConfigError, match="min_nodes=3, but the run has 2 hosts"):
        HostChoice(places_of(2), resolver(), 3)
    with pytest.raises(ConfigError, match="does not divide the 6 running"):
        HostChoice(places_of(3), resolver(parallel={"model_parallel": 4}), None)


def test_hosts_have_their_new_ranks() -> None:
    full = Hosts(
        all=tuple(Host(address=f"10.0.0.{n}", ranks=(2 * n, 2 * n + 1)) for n in range(3)),
        own=2,
        port=5,
    )
    places = places_of(3)
    found = hosts_of(full, [0, 2], places.only(("10.0.0.1", "node 2")))
    assert [host.ranks for host in found.all] == [(0, 1), (2, 3)]
    assert [host.address for host in found.all] == ["10.0.0.0", "10.0.0.2"] and found.own == 1


def test_a_rank_table_of_fewer_servers_is_a_valid_one() -> None:
    table = RankTable(
        version="1.0",
        servers=tuple(
            Server(
                server_id=f"10.0.0.{n + 1}",
                devices=tuple(
                    TableDevice(rank_id=3 * d + n, device_id=d, device_ip=f"10.1.{n}.{d + 1}")
                    for d in range(2)
                ),
            )
            for n in range(3)
        ),
    )
    smaller = table.only(("10.0.0.1", "10.0.0.3"))
    validate(smaller, "table")
    assert [(s.server_id, [d.rank_id for d in s.devices]) for s in smaller.servers] == [
        ("10.0.0.1", [0, 2]),
        ("10.0.0.3", [1, 3]),
    ]

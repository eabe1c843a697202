"""Ranks and groups against Megatron's own generator; layers of a stage against the rule."""

import warnings
from typing import Any

import pytest

from common.config.schema import ParallelConfig
from common.parallel.run import topology_of
from common.parallel.topology import Coordinates, GroupKind, Topology

LAYOUTS = ["1x1x1", "8x1x1", "1x4x1", "1x1x4", "2x2x2", "4x2x4", "4x8x1", "8x1x16", "1x8x16", "3x2x5", "5x3x2"]
"""data x tensor x pipeline"""
MEGATRON = {GroupKind.TENSOR: "tp", GroupKind.DATA: "dp", GroupKind.PIPELINE: "pp"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_and_coordinates_are_megatrons(layout: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = pytest.importorskip("megatron.core.parallel_state")
    data, tensor, pipeline = map(int, layout.split("x"))
    sizes = {"tp": tensor, "ep": 1, "dp": data, "pp": pipeline, "cp": 1}
    theirs = state.RankGenerator(**sizes, order="tp-cp-ep-dp-pp")
    topology = Topology(data=data, tensor=tensor, pipeline=pipeline)
    places: dict[str, dict[int, int]] = {}
    for kind, name in MEGATRON.items():
        wanted = theirs.get_ranks(name)
        assert topology.groups(kind) == wanted
        assert all([*topology.group(kind, rank)] == group for group in wanted for rank in group)
        places[kind.value] = {rank: place for group in wanted for place, rank in enumerate(group)}
    wanted = [state.default_embedding_ranks(ranks) for ranks in theirs.get_ranks("pp")]
    assert topology.groups(GroupKind.EMBEDDING) == wanted
    holders = {rank for group in wanted for rank in group}
    for rank in range(topology.world_size):
        at = Coordinates(**{axis: place[rank] for axis, place in places.items()})
        assert topology.coordinates(rank) == at and topology.rank(at) == rank
        assert topology.holds_head(rank) == (at.pipeline == pipeline - 1)
        assert (rank in topology.group(GroupKind.EMBEDDING, rank)) == (rank in holders)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize(("virtual", "style"), [(2, "loop"), (3, "loop"), (2, "v")])
def test_stages_lie_where_torchs_pipelines_look(ranks: int, virtual: int, style: str) -> None:
    utils = pytest.importorskip("torch.distributed.pipelining._utils")
    topology = Topology(pipeline=ranks, virtual=virtual, v_shape=style == "v")
    theirs = utils.generate_stage_to_rank_mapping(ranks, ranks * virtual, style=style)
    assert {stage: topology.place_of_stage(stage) for stage in range(topology.stages)} == theirs
    for place in range(ranks):
        stages = [stage for stage, rank in theirs.items() if rank == place]
        assert [*topology.stages_of(place)] == stages
    last = theirs[ranks * virtual - 1]
    assert topology.groups(GroupKind.EMBEDDING) == [sorted({theirs[0], last})]
    assert [rank for rank in range(ranks) if topology.holds_head(rank)] == [last]


def test_layers_of_virtual_and_uneven_stages() -> None:
    for topology, expected in (
        (Topology(pipeline=4), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (Topology(pipeline=2, virtual=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (Topology(pipeline=2, virtual=2, v_shape=True), [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (Topology(pipeline=3, stage_layers=(1, 4, 3)), [[0], [1, 2, 3, 4], [5, 6, 7]]),
    ):
        assert [topology.layers_of(place, 8) for place in range(topology.pipeline)] == expected
    cases: list[tuple[Any, int | None, int]] = [
        ("gpipe", 1, 4), ("interleaved_1f1b", None, 8), ("interleaved_zero_bubble", 3, 12), ("zbv_zero_bubble", None, 8)
    ]  # fmt: skip
    for schedule, virtual, stages in cases:
        written = ParallelConfig(pipeline_stage=4, pipeline_schedule=schedule, virtual_stages=virtual)
        topology = topology_of(written, 1)
        assert topology.stages == stages and topology.v_shape == (schedule == "zbv_zero_bubble")
        assert topology_of(ParallelConfig(pipeline_schedule=schedule), 1).stages == 1

"""The plan of semi-automatic parallel: what ranks hold tiles every parameter, strategies follow
from roles, groups of communication.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from common.parallel import operator_plan as plans
from common.parallel.run import Run
from common.parallel.sharding import padded_shapes
from tests.tiny import tiny_config

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data_parallel": 8},
    "data, optimizer split": {"data_parallel": 8, "zero_stage": 1},
    "optimizer split within fours": {"data_parallel": 8, "zero_stage": 2, "shard_size": 4},
    "all three": {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "zero_stage": 1},
    "whole table": {"data_parallel": 4, "model_parallel": 2, "vocab_emb_dp": True, "zero_stage": 1},
    "uneven stages": {"data_parallel": 4, "pipeline_stage": 2, "stage_layers": [1, 3]},
}


def make_config(parallel: dict[str, Any]) -> Run:
    if "zero_stage" in parallel:
        parallel |= {"parallel_optimizer_config": {"parallel_optimizer_threshold": 1}}
    return tiny_config(
        ranks=8,
        backend="mindspore",
        device="npu",
        model__num_layers=4,
        model__vocab_multiple=8,
        train={"max_steps": 4, "micro_batch_size": 2, "accumulation_steps": 2},
        parallel=parallel,
    )


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_pieces_of_ranks_tile_every_parameter(layout: str) -> None:
    config = make_config(LAYOUTS[layout])
    topology = config.topology
    some_split = False
    for name, shape in padded_shapes(config).items():
        stage = plans.stages_of_parameter(name, config)[0]
        places = {rank: topology.coordinates(rank) for rank in range(8)}
        pieces = {rank: plans.held_slice(name, config, at) for rank, at in places.items() if at.pipeline == stage}
        assert {piece.shape for piece in pieces.values()} == {plans.held_shape(name, config)}
        same = Counter(pieces.values())
        assert set(same.values()) == {plans.copies_of(name, config)}
        some_split |= len(same) > 1
        covered = np.zeros(shape, int)
        for rank, at in places.items():
            if plans.owns(name, config, at):
                columns = pieces[rank].columns
                covered[slice(*pieces[rank].rows), ...][..., slice(*columns or (None,))] += 1
        assert (covered == 1).all(), "every element is written once"
    assert some_split == (config.parallel.zero_stage > 0 or config.parallel.model_parallel > 1)


def test_strategies_follow_from_roles() -> None:
    plan = plans.operator_strategies(make_config(LAYOUTS["all three"]))
    for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.c_fc"):
        assert plan[f"h.*.{name}.matmul"].inputs == ((2, 1), (2, 1))
        assert plan[f"h.*.{name}.add"].inputs == ((2, 2), (2,))
    for name in ("attn.c_proj", "mlp.c_proj"):
        assert plan[f"h.*.{name}.matmul"].inputs == ((2, 2), (1, 2))
        assert plan[f"h.*.{name}.add"].inputs == ((2, 1), (1,))
    table = plan["wte.gather"].inputs[0], plan["head.matmul"].inputs[1]
    assert table == ((2, 1), (2, 1)), "the two uses of the tied table agree"
    along = plans.operator_strategies(make_config({**LAYOUTS["all three"], "sequence_parallel": True}))
    assert along["h.*.mlp.c_proj.matmul"].output == along["ln_f.layer_norm"].inputs[0] == (4, 1)
    whole = plans.operator_strategies(make_config(LAYOUTS["whole table"]))
    assert whole["wte.gather"].inputs == ((1, 1), (4, 1))
    assert whole["head.matmul"].inputs == ((8, 1), (1, 1))


def test_stages_and_groups() -> None:
    uneven = make_config(LAYOUTS["uneven stages"])
    assert [plans.stage_of(f"h.{layer}", uneven) for layer in range(4)] == [0, 1, 1, 1]
    assert plans.stages_of_parameter("wte.weight", uneven) == (0, 1)
    assert plans.stages_of_parameter("ln_f.bias", uneven) == (1,)
    assert {plans.fusion_of(layer, uneven) for layer in range(4)} == {1}
    for groups, expected in ((2, [1, 1, 2, 2]), (9, [1, 2, 3, 4])):
        config = make_config(LAYOUTS["data"] | {"gradient_aggregation_group": groups})
        assert [plans.fusion_of(layer, config) for layer in range(4)] == expected

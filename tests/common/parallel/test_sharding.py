"""What the ranks of a layout write is each parameter once, and any other layout reads it back. The
same of the plan of semi-automatic parallel, whose strategies follow from roles.
"""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from common.errors import CheckpointError
from common.parallel import operator_plan as plans
from common.parallel.run import Run
from common.parallel.sharding import owns, padded_shapes, slices_of_rank
from common.tensor_files.safetensors_file import open_safetensors
from common.weights.pieces import ShardedReader, shape_of
from tests.tiny import tiny_config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"model_parallel": 2}),
    "zero": (3, {"zero_stage": 1}),
    "hybrid": (4, {"zero_stage": 3, "shard_size": 2}),
    "all": (12, {"zero_stage": 1, "model_parallel": 2, "pipeline_stage": 2}),
}


def run_of(layout: str) -> Run:
    ranks, parallel = LAYOUTS[layout]
    sizes = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "seq_length": 7, "vocab_size": 14}
    train = {"micro_batch_size": 1}
    model = sizes | {"vocab_multiple": 7}
    return tiny_config(ranks=ranks, model=model, train=train, parallel=parallel)


def pieces_of(config: Run, rank: int, *, owned: bool) -> dict[str, Any]:
    topology = config.topology
    at = topology.coordinates(rank)
    layers = [f"h.{layer}." for layer in topology.layers_of(at.pipeline, config.model.num_layers)]
    begins = (*layers, *["wte"] * (at.pipeline in topology.embedding_places))
    begins += ("wpe",) * (topology.coordinates(rank).pipeline == 0) + ("ln_f",) * topology.holds_head(rank)
    names = [name for name in padded_shapes(config) if name.startswith(begins)]
    return {
        name: piece
        for name, piece in slices_of_rank(config, topology, at, names).items()
        if not owned or owns(config.parallel, topology, at, name)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_written_once_and_read_by_any_layout(layout: str, tmp_path: Path) -> None:
    config = run_of(layout)
    shapes = padded_shapes(config)
    generator = np.random.default_rng(0)
    whole = {name: generator.random(shape).astype(np.float32) for name, shape in shapes.items()}
    times = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    with ExitStack() as stack:
        files = []
        for rank in range(config.topology.world_size):
            pieces, tensors = pieces_of(config, rank, owned=True), {}
            for name, piece in pieces.items():
                spans = tuple(slice(*span) for span in piece)
                times[name][spans] += 1
                tensors[name] = np.ascontiguousarray(whole[name][spans])
            save_file(tensors, tmp_path / str(rank))
            file = stack.enter_context(safe_open(tmp_path / str(rank), framework="numpy"))
            files.append((file, pieces))
        assert all((count == 1).all() for count in times.values())
        stored = ShardedReader(tmp_path)
        for file, rectangles in files:
            stored.add(file, rectangles)
        stored.require(shapes)
        for other in LAYOUTS:
            wanted = run_of(other)
            for rank in range(wanted.topology.world_size):
                for name, piece in pieces_of(wanted, rank, owned=False).items():
                    spans = tuple(slice(*span) for span in piece)
                    there = whole[name][spans]  # another layout may have more rows of padding
                    found = stored.read(name, piece)
                    np.testing.assert_array_equal(found[: len(there)], there)
                    assert not found[len(there) :].any()
        lacking = ShardedReader(tmp_path)
        for file, rectangles in files[1:]:
            lacking.add(file, rectangles)
        with pytest.raises(CheckpointError):
            lacking.require(shapes)


def test_a_file_that_is_not_as_its_record_says(tmp_path: Path) -> None:
    save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / "file")
    stored = ShardedReader(tmp_path)
    stored.add(open_safetensors(tmp_path / "file"), {"a": [[0, 4], [0, 3]]})
    with pytest.raises(CheckpointError, match="a is not as its record says"):
        stored.read("a", ((0, 3), (0, 3)))


# ---- the plan of semi-automatic parallel ----

OPERATOR_LAYOUTS: dict[str, dict[str, Any]] = {
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
    model = {"model__num_layers": 4, "model__vocab_multiple": 8}
    train = {"max_steps": 4, "micro_batch_size": 2, "accumulation_steps": 2}
    return tiny_config(ranks=8, backend="mindspore", device="npu", **model, train=train, parallel=parallel)


@pytest.mark.parametrize("layout", list(OPERATOR_LAYOUTS))
def test_pieces_of_ranks_tile_every_parameter(layout: str) -> None:
    config = make_config(OPERATOR_LAYOUTS[layout])
    topology = config.topology
    some_split = False
    for name, shape in padded_shapes(config).items():
        stage = plans.stages_of_parameter(name, config)[0]
        places = {rank: topology.coordinates(rank) for rank in range(8)}
        pieces = {rank: plans.held_slice(name, config, at) for rank, at in places.items() if at.pipeline == stage}
        assert len(set(map(shape_of, pieces.values()))) == 1
        same = Counter(pieces.values())
        assert set(same.values()) == {plans.copies_of(name, config)}
        some_split |= len(same) > 1
        covered = np.zeros(shape, int)
        for rank, at in places.items():
            if plans.owns(name, config, at):
                covered[tuple(slice(*span) for span in pieces[rank])] += 1
        assert (covered == 1).all(), "every element is written once"
    assert some_split == (config.parallel.zero_stage > 0 or config.parallel.model_parallel > 1)


def test_strategies_follow_from_roles() -> None:
    plan = plans.operator_strategies(make_config(OPERATOR_LAYOUTS["all three"]))
    for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.c_fc"):
        assert plan[f"h.*.{name}.matmul"][0] == ((2, 1), (2, 1))
        assert plan[f"h.*.{name}.add"][0] == ((2, 2), (2,))
    for name in ("attn.c_proj", "mlp.c_proj"):
        assert plan[f"h.*.{name}.matmul"][0] == ((2, 2), (1, 2))
        assert plan[f"h.*.{name}.add"][0] == ((2, 1), (1,))
    table = plan["wte.gather"][0][0], plan["head.matmul"][0][1]
    assert table == ((2, 1), (2, 1)), "the two uses of the tied table agree"
    along = plans.operator_strategies(make_config({**OPERATOR_LAYOUTS["all three"], "sequence_parallel": True}))
    assert along["h.*.mlp.c_proj.matmul"][1] == along["ln_f.layer_norm"][0][:1] == ((4, 1),)
    whole = plans.operator_strategies(make_config(OPERATOR_LAYOUTS["whole table"]))
    assert whole["wte.gather"][0] == ((1, 1), (4, 1))
    assert whole["head.matmul"][0] == ((8, 1), (1, 1))


def test_stages_and_groups() -> None:
    uneven = make_config(OPERATOR_LAYOUTS["uneven stages"])
    assert [plans.stage_of(layer, uneven) for layer in range(4)] == [0, 1, 1, 1]
    assert plans.stages_of_parameter("wte.weight", uneven) == (0, 1)
    assert plans.stages_of_parameter("ln_f.bias", uneven) == (1,)
    assert {plans.fusion_of(layer, uneven) for layer in range(4)} == {1}
    for groups, expected in ((2, [1, 1, 2, 2]), (9, [1, 2, 3, 4])):
        config = make_config(OPERATOR_LAYOUTS["data"] | {"gradient_aggregation_group": groups})
        assert [plans.fusion_of(layer, config) for layer in range(4)] == expected

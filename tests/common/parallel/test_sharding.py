"""What the ranks of a layout write is each parameter once, and any other layout reads it back."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from common.errors import CheckpointError
from common.parallel.run import Run
from common.parallel.sharding import owns, padded_shapes, slices_of_rank
from common.weights.pieces import ShardedReader, to_rectangle
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
    begins += ("wpe",) * topology.holds_embedding(rank) + ("ln_f",) * topology.holds_head(rank)
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
                spans = tuple(slice(*span) for span in to_rectangle(piece))
                times[name][spans] += 1
                tensors[name] = np.ascontiguousarray(whole[name][spans])
            save_file(tensors, tmp_path / str(rank))
            file = stack.enter_context(safe_open(tmp_path / str(rank), framework="numpy"))
            files.append((file, {name: to_rectangle(piece) for name, piece in pieces.items()}))
        assert all((count == 1).all() for count in times.values())
        stored = ShardedReader(tmp_path)
        for file, rectangles in files:
            stored.add(file, rectangles)
        stored.require(shapes)
        for other in LAYOUTS:
            wanted = run_of(other)
            for rank in range(wanted.topology.world_size):
                for name, piece in pieces_of(wanted, rank, owned=False).items():
                    spans = tuple(slice(*span) for span in to_rectangle(piece))
                    there = whole[name][spans]  # another layout may have more rows of padding
                    found = stored.read(name, piece)
                    np.testing.assert_array_equal(found[: len(there)], there)
                    assert not found[len(there) :].any()
        lacking = ShardedReader(tmp_path)
        for file, rectangles in files[1:]:
            lacking.add(file, rectangles)
        with pytest.raises(CheckpointError):
            lacking.require(shapes)

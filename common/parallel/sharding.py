"""Table of how each parameter splits over tensor-parallel ranks, for backends, checkpoints and planner.

After Megatron-LM (arXiv 1909.08053, section 3). q, k, v and c_fc are split by outputs, so that each rank has whole
heads and its part of the inner width. Both c_proj are split by inputs, and their results are summed. The embedding,
which is also the head, is split by rows of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import Any

from common.config.resolved import ResolvedParallel
from common.parallel.run import Run
from common.parallel.topology import Coordinates, Topology
from common.weights.names import EMBEDDING, initial_rows, parameter_shapes
from common.weights.pieces import TensorSlice


class Role(StrEnum):
    VOCABULARY = "vocabulary"
    """Rows are tokens; split along dim 0."""
    COLUMN = "column"
    """(out, in) weight and (out,) bias; split along the outputs, dim 0."""
    ROW = "row"
    """(out, in) weight; split along the inputs, dim 1."""
    REPLICATED = "replicated"
    """Whole on every rank. With sequence parallelism its gradient is a sum over the tensor-parallel ranks."""


_ROLES = {
    r"wte\.weight": Role.VOCABULARY,
    r"h\.\d+\.(attn\.[qkv]_proj|mlp\.c_fc)\.(weight|bias)": Role.COLUMN,
    r"h\.\d+\.(attn|mlp)\.c_proj\.weight": Role.ROW,
    r"wpe\.weight|h\.\d+\.(ln_[12]\.(weight|bias)|(attn|mlp)\.c_proj\.bias)|ln_f\.(weight|bias)": Role.REPLICATED,
}


@cache
def role_of(name: str) -> Role:
    """Return the role of a parameter by its name (common.weights.names)."""
    found = [role for pattern, role in _ROLES.items() if re.fullmatch(pattern, name)]
    assert len(found) == 1, name
    return found[0]


def split_dim(name: str) -> int | None:
    """Return the dim that is split over tensor-parallel ranks in equal contiguous parts, or None."""
    return {Role.VOCABULARY: 0, Role.COLUMN: 0, Role.ROW: 1, Role.REPLICATED: None}[role_of(name)]


def local_shape(name: str, shape: tuple[int, ...], tensor: int) -> tuple[int, ...]:
    """Return the shape of one rank's part of a parameter with this (padded) shape."""
    dim = split_dim(name)
    if dim is None:
        return shape
    assert shape[dim] % tensor == 0, (name, shape, tensor)
    return (*shape[:dim], shape[dim] // tensor, *shape[dim + 1 :])


def padded_shapes(config: Run) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters, with the padding rows of the embedding."""
    return parameter_shapes(config.model) | {EMBEDDING: (config.vocab_rows, config.model.hidden_size)}


def slice_of(
    name: str, shape: tuple[int, ...], *, tensor: int = 1, tensor_rank: int = 0, shards: int = 1, shard_rank: int = 0
) -> TensorSlice:
    """Return the slice of a parameter with this padded shape that one rank holds.

    It is the tensor-parallel part, or ZeRO's share of its rows. ZeRO splits as torch.chunk does:
    equal parts of ceil(rows / shards) rows, the last ones smaller or empty.
    """
    dim, spans = split_dim(name), [(0, size) for size in shape]
    if dim is not None:
        part = shape[dim] // tensor
        spans[dim] = (tensor_rank * part, (tensor_rank + 1) * part)
    first, last = spans[0]
    share = -(-(last - first) // shards)
    spans[0] = (min(first + shard_rank * share, last), min(first + (shard_rank + 1) * share, last))
    return tuple(spans)


def slices_of_rank(config: Run, topology: Topology, at: Coordinates, names: Collection[str]) -> dict[str, TensorSlice]:
    """Return the slice of each parameter that the rank at these coordinates holds (with ZeRO: updates)."""
    shards = config.parallel.shards
    place = {"tensor": topology.tensor, "tensor_rank": at.tensor, "shards": shards, "shard_rank": at.data % shards}
    return {name: slice_of(name, shape, **place) for name, shape in padded_shapes(config).items() if name in names}


def initial_values(config: Run, pieces: Mapping[str, TensorSlice] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the initial weights by name: ``pieces`` of them, or all of them whole."""
    shapes = padded_shapes(config)
    for name, piece in (pieces or {each: slice_of(each, shapes[each]) for each in shapes}).items():
        yield (name, initial_rows(config.model, config.seed, name, shapes[name], *piece[0], *piece[1:]))


def owns(parallel: ResolvedParallel, topology: Topology, at: Coordinates, name: str) -> bool:
    """Tell whether the rank at these coordinates counts its slice in the gradient norm and in a checkpoint.

    One of the ranks that hold the same slice does.
    """
    if name == EMBEDDING and at.pipeline != topology.embedding_places[0]:
        return False
    return at.data < parallel.shards and (at.tensor == 0 or role_of(name) is not Role.REPLICATED)

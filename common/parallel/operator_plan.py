"""Plan of how MindSpore's compiler splits each operator of the model.

The plan is data, which mindformers_gpt2/semi_auto/network.py applies. A strategy gives, for each input of an operator,
the number of parts of each dim. Strategies of products with weights follow from the roles of
common/parallel/sharding.py. Operators between them are split so that neighbours agree. The compiler then inserts no
communication but Megatron's (arXiv 1909.08053, and with sequence parallelism arXiv 2205.05198).
"""

from __future__ import annotations

import math

from common.parallel.run import Run
from common.parallel.sharding import Role, local_shape, padded_shapes, role_of, slice_of
from common.parallel.topology import Coordinates
from common.tensor_files.arrays import NUMPY_TYPES
from common.weights.names import EMBEDDING
from common.weights.pieces import TensorSlice

Parts = tuple[int, ...]
Strategy = tuple[tuple[Parts, ...], tuple[Parts] | None]
"""Split of one operator: the parts of each dim of each input, and of the result where a sum over ranks leaves each
rank a part of it.
"""


def operator_strategies(config: Run, *, fused: bool = False) -> dict[str, Strategy]:
    """Map each operator of the training graph to its strategy; ``h.*`` stands for every block.

    Activations between layers are (B T, C), heads (B, nh, T, hs), logits (B T, V), with B, T, C,
    nh, hs and V as in the models. fused: attention is one operator.
    """
    data, tensor = config.topology.data, config.topology.tensor
    rows = data * tensor if config.parallel.sequence_parallel else data
    heads, stream = (data, tensor, 1, 1), (rows, 1)
    # rows of a whole vocabulary are split over all ranks of a stage, so that no logits are computed twice
    columns = tensor if splits_vocabulary(config) else 1
    row = (data * tensor // columns,)
    logits = (*row, columns)
    plan: dict[str, tuple[Parts, ...]] = {
        "wte.gather": ((columns, 1), (data, 1)),
        "wpe.gather": ((1, 1), (1,)),
        "embed.add": ((data, 1, 1), (1, 1)),
        "embed.dropout": (stream,),
        "h.*.dropout": (stream,),
        "h.*.add": (stream, stream),
        "h.*.attn.split_heads": ((data, 1, tensor, 1),),
        "h.*.attn.join_heads": (heads,),
        "h.*.mlp.gelu": ((data, tensor),),
        "head.matmul": ((*row, 1), (columns, 1)),
        "loss.mask": (logits, (columns,)),
        "loss.largest": (logits,),
        "loss.subtract": (logits, (*row, 1)),
        "loss.exp": (logits,),
        "loss.sum": (logits,),
        "loss.log": (row,),
        "loss.one_hot": (logits, (), ()),
        "loss.multiply": (logits, logits),
        "loss.difference": (row, row),
        "loss.total": (row,),
        "head.divide": ((), ()),
    }
    if fused:
        plan["h.*.attn.core.fused.causal"] = (heads, heads, heads, (1, 1))
    else:
        plan |= {
            "h.*.attn.core.multiply": (heads, ()),
            "h.*.attn.core.scores": (heads, heads),
            "h.*.attn.core.add": (heads, (1, 1)),
            "h.*.attn.core.softmax": (heads,),
            "h.*.attn.core.dropout": (heads,),
            "h.*.attn.core.mix": (heads, heads),
        }
    for name in ("h.*.ln_1", "h.*.ln_2", "ln_f"):
        plan[f"{name}.layer_norm"] = (stream, (1,), (1,))
    for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.c_fc"):
        plan[f"h.*.{name}.matmul"] = ((data, 1), (tensor, 1))
        plan[f"h.*.{name}.add"] = ((data, tensor), (tensor,))
    for name in ("attn.c_proj", "mlp.c_proj"):
        plan[f"h.*.{name}.matmul"] = ((data, tensor), (1, tensor))
        plan[f"h.*.{name}.add"] = (stream, (1,))
    sums = [name for name in plan if name.endswith("c_proj.matmul")] if rows > data else []
    return {name: (inputs, (stream,) if name in sums else None) for name, inputs in plan.items()}


def splits_vocabulary(config: Run) -> bool:
    """Tell whether tensor-parallel ranks split the embedding table and the head in modes 1 and 2.

    With a pipeline they always do, as in MindFormers r0.3, which then silently ignores ``vocab_emb_dp``.
    """
    parallel = config.parallel
    return parallel.model_parallel > 1 and not (parallel.vocab_emb_dp and parallel.pipeline_stage == 1)


def stage_of(layer: int, config: Run) -> int:
    """Return the pipeline stage of a block."""
    topology, layers = config.topology, config.model.num_layers
    return next(stage for stage in range(topology.stages) if layer in topology.layers_of_stage(stage, layers))


def fusion_of(layer: int, config: Run) -> int:
    """Return the number, from 1, of the group in which a block's gradients are communicated.

    With a pipeline there is one group, as in MindFormers: gradients are communicated once, after the last micro batch.
    """
    parallel, layers = config.parallel, config.model.num_layers
    return 1 if parallel.pipeline_stage > 1 else layer * min(parallel.gradient_aggregation_group, layers) // layers + 1


def stages_of_parameter(name: str, config: Run) -> tuple[int, ...]:
    """Return the pipeline stages that use a parameter; the first of them holds it."""
    last = config.topology.stages - 1
    if name.startswith("h."):
        return (stage_of(int(name.split(".")[1]), config),)
    return tuple(sorted({0, last})) if name == EMBEDDING else (last if name.startswith("ln_f") else 0,)


def splits_state(name: str, config: Run) -> bool:
    """Tell whether ZeRO splits a parameter, with its state, over data-parallel ranks.

    A parameter stays whole if it has too few rows, is small, or is whole on every tensor-parallel
    rank. So does an embedding that the last stage of a pipeline also uses: where it is sent there,
    the compiler adds gradients of unlike shapes.
    """
    parallel = config.parallel
    if (
        not parallel.zero_stage
        or role_of(name) is Role.REPLICATED
        or (parallel.model_parallel > 1 and not _is_split(name, config))
        or len(stages_of_parameter(name, config)) > 1
    ):
        return False
    tensor = parallel.model_parallel if _is_split(name, config) else 1
    shape = local_shape(name, padded_shapes(config)[name], tensor)
    size = math.prod(shape) * NUMPY_TYPES[config.precision.parameters].itemsize
    threshold = parallel.parallel_optimizer_config.parallel_optimizer_threshold
    return shape[0] % parallel.shards == 0 and size >= 1024 * threshold


def held_slice(name: str, config: Run, at: Coordinates) -> TensorSlice:
    """Return the slice of a parameter that the rank at these coordinates holds.

    Slices are equal parts, first over tensor-parallel ranks, then over those of ZeRO.
    """
    shards = _shards(name, config)
    tensor, tensor_rank = (config.parallel.model_parallel, at.tensor) if _is_split(name, config) else (1, 0)
    shape = padded_shapes(config)[name]
    return slice_of(name, shape, tensor=tensor, tensor_rank=tensor_rank, shards=shards, shard_rank=at.data % shards)


def owns(name: str, config: Run, at: Coordinates) -> bool:
    """Tell whether the rank at these coordinates writes its slice of a parameter.

    One of the ranks that hold the same slice does.
    """
    first = stages_of_parameter(name, config)[0]
    return at.pipeline == first and at.data < _shards(name, config) and (at.tensor == 0 or _is_split(name, config))


def copies_of(name: str, config: Run) -> int:
    """Return the number of ranks that hold the same slice of a parameter, this one included."""
    topology = config.topology
    return topology.data // _shards(name, config) * (1 if _is_split(name, config) else topology.tensor)


def _is_split(name: str, config: Run) -> bool:
    role = role_of(name)
    return splits_vocabulary(config) if role is Role.VOCABULARY else role is not Role.REPLICATED


def _shards(name: str, config: Run) -> int:
    return config.parallel.shards if splits_state(name, config) else 1

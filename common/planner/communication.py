"""Bytes that one rank sends in an optimizer step along each axis of the layout.

The algorithms are rings (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", 2009). Of B bytes over k ranks an all-reduce sends 2 (k - 1) / k B, and a
reduce-scatter or an all-gather half of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.parallel.run import BYTES, Run
from common.parallel.topology import GroupKind
from common.planner.activations import recomputed_of_rank
from common.planner.memory import is_fully_sharded, keeps_whole_gradients, shard_ranks, units_of


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent by one rank in one step."""

    tensor: float = 0.0
    """All-reduces of activations within layers, vocabulary and loss."""
    sequence: float = 0.0
    """Gathers and reduce-scatters of sequence parallelism, instead of all-reduces, and gradients of
    whole parameters.
    """
    data: float = 0.0
    """Gradients, and with ZeRO parameters."""
    pipeline: float = 0.0
    """Activations and their gradients between stages."""
    embedding: float = 0.0
    """Gradients of the tied embedding, between the first and the last stage."""


def all_reduce(size: float, ranks: int) -> float:
    """Bytes sent for ``size`` bytes on each of the ranks."""
    return 2 * all_gather(size, ranks)


def all_gather(size: float, ranks: int) -> float:
    """Bytes sent for ``size`` bytes in total; a reduce-scatter sends as many."""
    return (ranks - 1) / ranks * size


def traffic_of(config: Run, place: int) -> Traffic:
    """Return the traffic of the pipeline rank at this place."""
    micro_batches, sizes, topology = config.train.accumulation_steps, config.sizes, config.topology
    within = micro_batches * _within_layers(config, place)
    # stages on other ranks to which a stage sends activations, or gradients
    neighbours = sum(
        0 <= other < topology.stages and topology.place_of_stage(other) != place
        for stage in topology.stages_of(place)
        for other in (stage - 1, stage + 1)
    )
    owners = shard_ranks(config) if is_fully_sharded(config) else 1
    embedding = 0.0
    holders = topology.group(GroupKind.EMBEDDING, place * topology.data * topology.tensor)
    if len(holders) > 1:
        embedding = all_reduce(4 * sizes.vocabulary * sizes.hidden / topology.tensor, len(holders))
        embedding /= owners
    # once a step, gradients of parameters that every tensor-parallel rank holds: each of them has
    # seen only a part of the sequence
    replicated = sum(unit.replicated * unit.count for unit in units_of(config, place))
    replicated_bytes = all_reduce(4 * replicated, topology.tensor) / owners
    shared = config.parallel.sequence_parallel and topology.tensor > 1
    return Traffic(
        tensor=0.0 if shared else within,
        sequence=within + replicated_bytes if shared else 0.0,
        data=_data(config, place),
        pipeline=float(micro_batches * neighbours * sizes.residual),
        embedding=embedding,
    )


def _within_layers(config: Run, place: int) -> float:
    """Return the bytes of one micro batch.

    A block sums activations twice in its forward pass and gradients twice in its backward pass
    (Megatron, arXiv 1909.08053, section 3). A gather and a reduce-scatter each take as much (arXiv
    2205.05198, section 4.2.2). Recomputing a block repeats only the sum of attention, since the
    last one keeps nothing for the backward pass. With sequence parallelism it repeats both gathers.
    """
    topology, sizes, ranks = config.topology, config.sizes, config.topology.tensor
    if ranks == 1:
        return 0.0
    one = all_reduce(sizes.region, ranks)
    total = 4 * one * topology.layer_count(place, config.model.num_layers)
    if config.train.recompute == "full":
        again = 1.5 if config.parallel.sequence_parallel else 1.0
        total += again * one * recomputed_of_rank(config, place)
    if place == 0:  # sum over the parts of the embedding, in the type of the table
        total += all_reduce(sizes.tokens * sizes.hidden * sizes.held, ranks)
    # gradient of the hidden states; largest logit, sum and target in float32
    if place == topology.place_of_stage(topology.stages - 1):
        total += one + all_reduce(3 * 4 * sizes.tokens, ranks)
    return total


def _data(config: Run, place: int) -> float:
    """Return the bytes of gradients and parameters between data-parallel ranks.

    Without ZeRO each step has an all-reduce of the gradients. With ZeRO it has both halves of one
    (arXiv 1910.02054, section 7). The gradients are reduce-scattered once a step or a micro batch.
    The parameters are gathered once a step; in stage 3 every micro batch gathers those of blocks
    for the forward and for the backward pass. With hybrid sharding the reduced parts are summed
    over the copies once a step.
    """
    ranks, cut, zero = config.topology.data, shard_ranks(config), config.parallel.zero_stage
    if ranks == 1:
        return 0.0
    micro_batches = config.train.accumulation_steps
    padded = is_fully_sharded(config)  # so that every rank has equally many rows
    blocks, *others = (
        unit.count * (cut * unit.share(cut) if padded else unit.elements) for unit in units_of(config, place)
    )
    elements = blocks + sum(others)
    held, reduced = BYTES[config.precision.parameters], BYTES[config.precision.reduction]
    if cut == 1:  # a pipeline sums float32 gradients after its last micro batch
        return all_reduce(elements * (4 if config.topology.pipeline > 1 else reduced), ranks)
    reductions = 1 if keeps_whole_gradients(config) else micro_batches
    # a pipeline keeps parameters gathered
    gathered = elements if zero < 3 or config.topology.pipeline > 1 else micro_batches * (elements + blocks)
    copies = all_reduce(elements * reduced / cut, ranks // cut)
    return all_gather(elements * reduced, cut) * reductions + copies + all_gather(gathered * held, cut)

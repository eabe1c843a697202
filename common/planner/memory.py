"""Bytes that each pipeline rank holds: weights, gradients, optimizer, activations, loss and buffers.

Its tensor and data-parallel ranks hold as much. ZeRO (arXiv 1910.02054) is counted as FSDP2 does it on torch's native
engine. Each rank keeps its rows of every parameter in float32. In stages 1 and 2, parameters are gathered for the
passes of a step; a pipeline does so too. In stage 3 they are gathered a block at a time. Gathered parameters have the
type of precision.parameters. In stage 1, and in a pipeline, gradients of several micro batches add up whole. Otherwise
each block's gradients are reduced when its backward pass ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from common.parallel.pipeline import gradients_at_most, held_at_most
from common.parallel.run import BYTES, Run
from common.parallel.sharding import local_shape
from common.planner import activations
from common.weights.names import EMBEDDING, parameter_shapes


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device at one place of the pipeline: tensor and data-parallel ranks have equally much. Temporary
    memory is counted at its peak.
    """

    parameters: int
    """Number of elements before ZeRO splits, with padding and the last stage's copy of the tied embedding."""
    weights: int
    """Weights that the rank owns, after the split by ZeRO."""
    gathered: int = 0
    """Whole parameters beside them, with ZeRO."""
    gradients: int
    optimizer: int
    """Moments, float32 copies of whole weights below float32, and Adam's step of 4 bytes per tensor."""
    activations: int
    """Activations kept for backward passes, for all micro batches in progress at once."""
    loss: int
    """Gradients that the loss computes in its forward pass, for as many micro batches."""
    working: int
    """Temporary memory of a pass: logits, recomputed activations, gradients between layers."""
    communication: int
    """Buffers of messages: gathered and reduced blocks, and gradients from other stages."""
    on_host: int = 0
    """Activations in the memory of the host, which are not part of the device's peak."""
    shared: int = 0
    """Bytes of other parts that reuse memory.

    Where all micro batches go forward before the first one goes backward, the activations of one are freed while
    gradients appear. With FSDP2, the fullest phase of a step has only some of the parts.
    """

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the device's memory, by name."""
        return {name: size for name, size in vars(self).items() if name not in ("parameters", "on_host", "shared")}

    @property
    def peak(self) -> int:
        return sum(self.parts.values()) - self.shared


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are communicated together: a block, or all others of the rank.

    ``shapes`` are those of one tensor-parallel rank.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    count: int = 1

    @cached_property
    def elements(self) -> int:
        """Number of elements in one of the units."""
        return self.share(1)

    def share(self, ranks: int) -> int:
        """Return the elements of one unit on the fullest rank, with each parameter split along its first dimension."""
        return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for _, shape in self.shapes)


def units_of(config: Run, place: int) -> tuple[Unit, ...]:
    """Return the parameters of the pipeline rank at this place: blocks, embeddings and final norm."""
    topology, whole = config.topology, parameter_shapes(config.model, 1)
    whole[EMBEDDING] = (config.vocab_rows, whole[EMBEDDING][1])
    shapes = [(name, local_shape(name, shape, topology.tensor)) for name, shape in whole.items()]
    holders = {
        EMBEDDING: topology.embedding_places,
        "wpe.": (0,),
        "ln_f.": (topology.place_of_stage(topology.stages - 1),),
    }
    held = tuple(name for name, places in holders.items() if place in places)
    blocks = Unit(
        shapes=tuple(item for item in shapes if item[0].startswith("h.")),
        count=topology.layer_count(place, config.model.num_layers),
    )
    others = Unit(shapes=tuple(item for item in shapes if item[0].startswith(held)))
    return (blocks, others) if held else (blocks,)


def is_fully_sharded(config: Run) -> bool:
    """Tell whether FSDP2 splits, parameter by parameter.

    DeepSpeed and MindSpore split all parameters as one sequence.
    """
    return config.backend == "torch" and config.engine == "native" and config.parallel.shards > 1


def keeps_whole_gradients(config: Run) -> bool:
    """Tell whether gradients of several micro batches add up before ranks exchange them."""
    parallel, several = config.parallel, config.train.accumulation_steps > 1
    if config.parallel.shards == 1:
        return True
    if not is_fully_sharded(config):
        return parallel.zero_stage == 1
    return several and (parallel.zero_stage == 1 or parallel.pipeline_stage > 1)


def has_low_gradients(config: Run) -> bool:
    """Tell whether DeepSpeed's ZeRO adds up gradients of weights below float32, in precision.reduction."""
    is_zero = config.engine == "deepspeed" and config.parallel.zero_stage > 0
    return is_zero and BYTES[config.precision.parameters] < 4


def memory_of(config: Run, place: int) -> Memory:
    """Return the memory of the pipeline rank at this place."""
    topology = config.topology
    units = units_of(config, place)
    held, ranks, zero = BYTES[config.precision.parameters], config.parallel.shards, config.parallel.zero_stage
    whole = sum(unit.elements * unit.count for unit in units)
    sharded = is_fully_sharded(config)
    cut = sum(unit.share(ranks) * unit.count for unit in units) if sharded else -(-whole // ranks)
    weights = cut * 4 if sharded else (cut if zero == 3 else whole) * held
    if config.rounds_weights_once:
        linear = (math.prod(shape) for name, shape in units[0].shapes if ".ln_" not in name)
        weights += BYTES[config.precision.compute] * units[0].count * sum(linear)
    tensors = sum(len(unit.shapes) * unit.count for unit in units)
    moments, counters = len(config.optimizer.state_parts), config.optimizer.rule.counts_updates
    # ZeRO, section 3.1. FSDP2's weights already are that copy; DeepSpeed copies float32 ones too.
    copy = not sharded and (held < 4 or (config.engine == "deepspeed" and zero > 0))
    optimizer = 4 * ((cut if zero else whole) * (moments + copy) + counters * tensors)
    if config.engine == "deepspeed":
        weights *= not config.deepspeed.offload_parameters
        optimizer *= not config.deepspeed.offload_optimizer
    at_once = min(2, units[0].count) * units[0].elements + sum(unit.elements for unit in units[1:])
    is_whole = zero < 3 or (sharded and topology.pipeline > 1)
    gathered = (whole if is_whole else at_once) * held if ranks > 1 and (zero == 3 or sharded) else 0
    layers = config.model.num_layers
    saved, in_loss, on_host, waiting = _saved(config, place)
    peaks = [
        peak
        for stage in topology.stages_of(place)
        for peak in activations.moments_in_blocks(config, len(topology.layers_of_stage(stage, layers)))
    ]
    if place == topology.place_of_stage(topology.stages - 1):
        peaks.append((0, activations.while_in_loss(config)))
    alone = working = max((more - free for free, more in peaks), default=0)
    reduction = BYTES[config.precision.reduction]
    low = has_low_gradients(config)
    if keeps_whole_gradients(config):
        gradients = whole * (reduction if sharded or low else 4)
    else:
        gradients = cut * (reduction if low else 4)
    if low and reduction < 4:  # the update joins and widens them, after all activations
        working = max(working, cut * (reduction + 4) - saved - in_loss)
    shared = 0
    if waiting:  # activations of the micro batch that goes backward first are free by then
        first = (saved + in_loss) // waiting
        less = (more - free - min(gradients, max(0, first - free)) for free, more in peaks)
        shared = alone - max(less, default=alone)
    memory = Memory(
        parameters=whole,
        weights=weights,
        gathered=gathered,
        gradients=gradients,
        optimizer=optimizer,
        activations=saved,
        loss=in_loss,
        working=working,
        communication=_buffers(config, place, units),
        on_host=on_host,
        shared=shared,
    )
    if not sharded or topology.pipeline > 1:
        return memory
    beside = sum(memory.parts.values()) - weights - optimizer
    return replace(memory, shared=max(0, beside - _most_in_sharded_step(config, units, memory)))


def _most_in_sharded_step(config: Run, units: tuple[Unit, ...], memory: Memory) -> int:
    """Return the most bytes beside weights and optimizer where FSDP2 splits, without a pipeline.

    Blocks and the unit of all other parameters are communicated at different times. So the peak is
    that of the fullest phase, not the sum of all buffers. Sizes are those of an accelerator: below
    float32 a CPU also makes a float32 copy of the head's gradient.
    """
    sizes, zero, blocks = config.sizes, config.parallel.zero_stage, units[0]
    several = config.train.accumulation_steps > 1
    others = sum(unit.elements for unit in units[1:])
    gathered, saved = memory.gathered, memory.activations
    held, reduced = BYTES[config.precision.parameters], BYTES[config.precision.reduction]
    summed = max(held, reduced)  # bytes of an element of the token table's gradient
    table = sizes.vocabulary * sizes.hidden // sizes.tensor * 4
    # gradients of all blocks after their reduction
    of_blocks = 0 if several else 4 * blocks.count * blocks.share(config.parallel.shards)
    kept = others * held if zero == 3 else gathered
    loss = kept + saved + memory.loss + activations.while_in_loss(config)
    # the message of one block is on its way while the next one goes backward; the last block recomputes only if all do
    recomputes = activations.recomputed(config, blocks.count) == blocks.count
    mode = config.train.recompute if recomputes else "none"
    sent = blocks.elements * (held + reduced) - activations.block_bytes(config, mode)
    moments = activations.moments_in_blocks(config, blocks.count)
    working = max((more - free for free, more in moments), default=0)
    backward = gathered + saved + table + working + max(0, sent)
    # the blocks are reduced; the loss's gradient of the table meets that of the lookup
    copied = table * held // 4 if held < reduced else 0  # the lookup's, before its float32 copy
    lookup = gathered + 2 * table + copied + of_blocks
    # only the last backward pass lets go of the parameters before it reduces
    still = gathered if several and zero == 2 else 0
    last = still + others * (summed + reduced) + of_blocks
    return max(loss, backward, lookup, last) + (memory.gradients if several else 0)


def _saved(config: Run, place: int) -> tuple[int, int, int, int]:
    """Return the bytes of activations, of the loss and on the host, of all micro batches that wait
    at once. The fourth number is how many these are, if all of a step go forward before the first
    backward pass, when there are no gradients yet; else 0.
    """
    topology = config.topology
    stages = {stage: _saved_by_stage(config, stage) for stage in topology.stages_of(place)}
    micro_batches = config.train.accumulation_steps
    held = dict.fromkeys(stages, 1)
    if topology.pipeline > 1:
        sizes = {stage: sum(saved) for stage, saved in stages.items()}
        held = held_at_most(config.parallel.pipeline_schedule, topology, place, micro_batches, sizes)
    in_blocks, loss, on_host = (sum(held[stage] * saved[part] for stage, saved in stages.items()) for part in range(3))
    alike = micro_batches == 1 or len(held) == 1
    waiting = micro_batches if alike and set(held.values()) == {micro_batches} else 0
    return in_blocks, loss, on_host, waiting


def _saved_by_stage(config: Run, stage: int) -> tuple[int, int, int]:
    """Return the bytes of activations, of the loss and on the host that one micro batch keeps.

    The pipeline keeps what a stage has received and what it sends. They are the same memory if the
    next stage is on the same rank.
    """
    sizes, topology, mode = config.sizes, config.topology, config.train.recompute
    place = topology.place_of_stage(stage)
    offloads = config.train.offload_activations
    layers = len(topology.layers_of_stage(stage, config.model.num_layers))
    in_blocks = activations.blocks_bytes(config, layers)
    saved = 0 if offloads else in_blocks
    if layers and config.data.reset_attention_mask:
        # the mask that all blocks share; CUDA's kernels that skip blocks of pairs need less
        saved += sizes.tokens * sizes.seq_length * sizes.compute
    loss = 0
    if stage == 0:
        positions = sizes.tokens if config.data.reset_position_ids else sizes.seq_length
        saved += 8 * (sizes.tokens + positions)  # ids and positions are int64
        saved += sizes.mask if config.model.embedding_dropout else 0
    else:
        same = activations.input_of_norm(config) == sizes.compute
        is_in_block = layers > 0 and not offloads and (mode == "full" or same)
        is_sent = topology.place_of_stage(stage - 1) != place
        saved += (is_sent - is_in_block) * sizes.residual
    if stage == topology.stages - 1:
        saved += activations.norm_bytes(config)
        # gradients of hidden states, and of the head in float32, or in the computation's type where a graph keeps it so
        element = sizes.compute if activations.has_regions(config) else 4
        loss = sizes.region + element * sizes.vocabulary * sizes.hidden // sizes.tensor
    else:
        saved += sizes.residual
    return max(0, saved), loss, in_blocks if offloads else 0


def _buffers(config: Run, place: int, units: tuple[Unit, ...]) -> int:
    """Return the bytes of message buffers.

    For a gradient from another stage, FrugalStage of torch_gpt2/parallel/private_api.py has a
    buffer only while it is needed. FSDP2 copies a unit into and out of one message, and keeps the
    unit's whole gradients beside the message that reduces them.
    """
    topology, parallel = config.topology, config.parallel
    waiting = gradients_at_most(parallel.pipeline_schedule, topology, place, config.train.accumulation_steps)
    received = waiting * config.sizes.residual
    largest = max(unit.elements for unit in units)
    held, reduced = BYTES[config.precision.parameters], BYTES[config.precision.reduction]
    if is_fully_sharded(config):
        return received + largest * (held + held + reduced)
    if config.engine == "deepspeed" and parallel.zero_stage in (1, 2):
        in_type = parallel.zero_stage == 1 and has_low_gradients(config)
        return received + _DEEPSPEED_BUCKET * (reduced if in_type else held)
    is_ddp = parallel.shards == topology.pipeline == 1 < topology.data
    if is_ddp and reduced < held:
        return received + _BUCKET // 4 * reduced
    return received


_DEEPSPEED_BUCKET = 500_000_000
"""Elements of the buffer that DeepSpeed's ZeRO 1 and 2 allocate in each step, whatever the model:
the default of its reduce_bucket_size.
"""
_BUCKET = 25 * 2**20
"""Bytes of DDP's buckets. Gradients are views of them; sent in another type, one is copied at a time."""

"""Bytes that each pipeline rank holds: weights, gradients, optimizer, activations, loss and
buffers.

Its tensor and data-parallel ranks hold as much. ZeRO (arXiv 1910.02054) is counted as FSDP2 does it
on torch's native engine. Each rank keeps its rows of every parameter in float32. In stages 1 and 2,
parameters are gathered for the passes of a step; a pipeline does so too. In stage 3 they are
gathered a block at a time. Gathered parameters have the type of precision.parameters. In stage 1,
and in a pipeline, gradients of several micro batches add up whole. Otherwise each block's gradients
are reduced when its backward pass ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

from common.config.resolved import ResolvedModel
from common.parallel.pipeline import gradients_at_most, held_at_most
from common.parallel.run import BYTES, Run
from common.parallel.sharding import local_shape, split_dim
from common.parallel.topology import Topology
from common.planner import activations
from common.planner.sharded_step import peak_of_step
from common.weights.names import EMBEDDING, parameter_shapes

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Shapes of parameters by name."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device. Temporary memory is counted at its peak."""

    weights: int
    """Weights that the rank owns, after the split by ZeRO."""
    gathered: int = 0
    """Whole parameters beside them, with ZeRO."""
    gradients: int
    optimizer: int
    """Moments, float32 copies of whole weights below float32, and Adam's step of 4 bytes per
    tensor.
    """
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

    Where all micro batches go forward before the first one goes backward, the activations of one
    are freed while gradients appear. With FSDP2, the fullest phase of a step (sharded_step.py) has
    only some of the parts.
    """

    @property
    def state(self) -> int:
        """Bytes of model and optimizer, which do not depend on the batch."""
        return self.weights + self.gathered + self.gradients + self.optimizer

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the device's memory, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("on_host", "shared")
        }

    @property
    def peak(self) -> int:
        return sum(self.parts.values()) - self.shared


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are communicated together: a block, or all others of the rank.

    ``shapes`` are those of one tensor-parallel rank.
    """

    shapes: Shapes
    count: int = 1

    @cached_property
    def elements(self) -> int:
        """Number of elements in one of the units."""
        return self.share(1)

    @cached_property
    def replicated(self) -> int:
        """Number of elements that every tensor-parallel rank holds."""
        return sum(math.prod(shape) for name, shape in self.shapes if split_dim(name) is None)

    @cached_property
    def in_linear_layers(self) -> int:
        """Number of elements of linear layers, biases included."""
        return sum(
            math.prod(shape)
            for name, shape in self.shapes
            if name.startswith("h.") and ".ln_" not in name
        )

    def share(self, ranks: int) -> int:
        """Return the elements of one unit on the fullest rank, with each parameter split along its
        first dimension.
        """
        return sum(-(-rows // ranks) * width for rows, width in self._matrices)

    @cached_property
    def _matrices(self) -> tuple[tuple[int, int], ...]:
        return tuple((shape[0], math.prod(shape[1:])) for _, shape in self.shapes)


def units_of(config: Run, topology: Topology, place: int) -> tuple[Unit, ...]:
    """Return the parameters of the pipeline rank at this place: blocks, embeddings and final
    norm.
    """
    rows, last = config.vocab_rows, topology.place_of_stage(topology.stages - 1)
    held = tuple(
        name
        for name, places in (
            (EMBEDDING, topology.embedding_places),
            ("wpe.", (0,)),
            ("ln_f.", (last,)),
        )
        if place in places
    )
    return _units(
        config.model,
        rows,
        topology.tensor,
        held,
        topology.layer_count(place, config.model.num_layers),
    )


@lru_cache(maxsize=256)
def _units(
    model: ResolvedModel, rows: int, tensor: int, held: tuple[str, ...], layers: int
) -> tuple[Unit, ...]:
    """Return the parameters of one tensor-parallel rank.

    It has this many blocks, and all other parameters whose names begin with one of ``held``.
    """
    whole = parameter_shapes(model, 1)
    whole[EMBEDDING] = (rows, whole[EMBEDDING][1])
    shapes = [(name, local_shape(name, shape, tensor)) for name, shape in whole.items()]
    blocks = Unit(shapes=tuple(item for item in shapes if item[0].startswith("h.")), count=layers)
    others = Unit(shapes=tuple(item for item in shapes if item[0].startswith(held)))
    return (blocks, others) if held else (blocks,)


def shard_ranks(config: Run) -> int:
    """Return the data-parallel ranks over which ZeRO splits; 1 if nothing is split."""
    parallel = config.parallel
    return (parallel.shard_size or parallel.data_parallel) if parallel.zero_stage else 1


def is_fully_sharded(config: Run) -> bool:
    """Tell whether FSDP2 splits, parameter by parameter.

    DeepSpeed and MindSpore split all parameters as one sequence.
    """
    return config.backend == "torch" and config.engine == "native" and shard_ranks(config) > 1


def keeps_whole_gradients(config: Run) -> bool:
    """Tell whether gradients of several micro batches add up before ranks exchange them."""
    parallel, several = config.parallel, config.train.accumulation_steps > 1
    if shard_ranks(config) == 1:
        return True
    if not is_fully_sharded(config):
        return parallel.zero_stage == 1
    return several and (parallel.zero_stage == 1 or parallel.pipeline_stage > 1)


def has_low_gradients(config: Run) -> bool:
    """Tell whether DeepSpeed's ZeRO adds up gradients of weights below float32, in
    precision.reduction.
    """
    is_zero = config.engine == "deepspeed" and config.parallel.zero_stage > 0
    return is_zero and BYTES[config.precision.parameters] < 4


def memory_of(config: Run, topology: Topology, place: int) -> Memory:
    """Return the memory of the pipeline rank at this place."""
    units = units_of(config, topology, place)
    held, ranks, zero = (
        BYTES[config.precision.parameters],
        shard_ranks(config),
        config.parallel.zero_stage,
    )
    whole = sum(unit.elements * unit.count for unit in units)
    sharded = is_fully_sharded(config)
    cut = sum(unit.share(ranks) * unit.count for unit in units) if sharded else -(-whole // ranks)
    weights = cut * 4 if sharded else (cut if zero == 3 else whole) * held
    if config.rounds_weights_once:
        weights += BYTES[config.precision.compute] * sum(
            unit.in_linear_layers * unit.count for unit in units
        )
    tensors = sum(len(unit.shapes) * unit.count for unit in units)
    moments, counters = len(config.optimizer.state_parts), config.optimizer.rule.counts_updates
    # ZeRO, section 3.1. FSDP2's weights already are that copy; DeepSpeed copies float32 ones too.
    copy = not sharded and (held < 4 or (config.engine == "deepspeed" and zero > 0))
    optimizer = 4 * ((cut if zero else whole) * (moments + copy) + counters * tensors)
    if config.engine == "deepspeed":
        weights, optimizer = (
            weights * (not config.deepspeed.offload_parameters),
            optimizer * (not config.deepspeed.offload_optimizer),
        )
    at_once = min(2, units[0].count) * units[0].elements + sum(unit.elements for unit in units[1:])
    is_whole = zero < 3 or (sharded and topology.pipeline > 1)
    gathered = (
        (whole if is_whole else at_once) * held if ranks > 1 and (zero == 3 or sharded) else 0
    )
    layers = config.model.num_layers
    saved, in_loss, on_host = _saved(config, topology, place)
    waiting = _waiting(config, topology, place)
    is_last = place == topology.place_of_stage(topology.stages - 1)
    peaks = [
        peak
        for stage in topology.stages_of(place)
        for peak in activations.moments_in_blocks(
            config, len(topology.layers_of_stage(stage, layers))
        )
    ]
    if is_last:
        peaks.append((0, activations.while_in_loss(config)))
    working = max((more - free for free, more in peaks), default=0)
    reduction = BYTES[config.precision.reduction]
    low = has_low_gradients(config)
    if keeps_whole_gradients(config):
        gradients = whole * (reduction if sharded or low else 4)
    else:
        gradients = cut * (reduction if low else 4)
    if low and reduction < 4:  # the update joins and widens them, after all activations
        working = max(working, cut * (reduction + 4) - saved - in_loss)
    memory = Memory(
        weights=weights,
        gathered=gathered,
        gradients=gradients,
        optimizer=optimizer,
        activations=saved,
        loss=in_loss,
        working=working,
        communication=_buffers(config, topology, place, units),
        on_host=on_host,
        shared=_shared(peaks, gradients, (saved + in_loss) // waiting) if waiting else 0,
    )
    if not sharded or topology.pipeline > 1:
        return memory
    step = peak_of_step(
        config,
        layers=units[0].count,
        block=units[0].elements,
        others=sum(unit.elements for unit in units[1:]),
        gathered=gathered,
        gradients=gradients,
        of_blocks=4 * units[0].count * units[0].share(ranks),
        saved=saved,
        in_loss=in_loss,
    )
    parts = sum(memory.parts.values())
    return replace(memory, shared=max(0, parts - weights - optimizer - step))


def _shared(peaks: Sequence[tuple[int, int]], gradients: int, first: int) -> int:
    """Return the bytes of gradients that take the place of activations, at the peak of a step.

    first: bytes of the micro batch that goes backward first, which are free before all gradients
    are there.
    """
    alone = max((more - free for free, more in peaks), default=0)
    less = (more - free - min(gradients, max(0, first - free)) for free, more in peaks)
    return alone - max(less, default=alone)


def _waiting(config: Run, topology: Topology, place: int) -> int:
    """Return the number of micro batches of a step if all of them go forward before the first
    backward pass, when there are no gradients yet; else 0.
    """
    micro_batches, stages = config.train.accumulation_steps, topology.stages_of(place)
    if micro_batches == 1:
        return 1
    if topology.pipeline == 1 or len(stages) > 1:
        return 0
    held = held_at_most(
        config.parallel.pipeline_schedule, topology, place, micro_batches, dict.fromkeys(stages, 1)
    )
    return micro_batches if held[stages[0]] == micro_batches else 0


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """Bytes that one micro batch keeps in one stage."""

    activations: int
    loss: int
    on_host: int

    @property
    def on_device(self) -> int:
        return self.activations + self.loss


def _saved(config: Run, topology: Topology, place: int) -> tuple[int, int, int]:
    """Return the bytes of activations, of the loss and on the host, of all micro batches that wait
    at once.
    """
    stages = {
        stage: _saved_by_stage(config, topology, stage) for stage in topology.stages_of(place)
    }
    micro_batches = config.train.accumulation_steps
    if topology.pipeline == 1:
        held = dict.fromkeys(stages, 1)
    else:
        sizes = {stage: saved.on_device + saved.on_host for stage, saved in stages.items()}
        held = held_at_most(
            config.parallel.pipeline_schedule, topology, place, micro_batches, sizes
        )
    activations_of, loss, on_host = (
        sum(held[stage] * getattr(saved, part) for stage, saved in stages.items())
        for part in ("activations", "loss", "on_host")
    )
    return activations_of, loss, on_host


def _saved_by_stage(config: Run, topology: Topology, stage: int) -> _Saved:
    """Return the bytes that one micro batch keeps.

    The pipeline keeps what a stage has received and what it sends. They are the same memory if the
    next stage is on the same rank.
    """
    sizes, mode, place = config.sizes, config.train.recompute, topology.place_of_stage(stage)
    offloads = config.train.offload_activations
    layers = len(topology.layers_of_stage(stage, config.model.num_layers))
    in_blocks = activations.blocks_bytes(config, layers)
    saved = activations.documents_bytes(config) if layers else 0
    saved += 0 if offloads else in_blocks
    loss = 0
    if stage == 0:
        saved += activations.embedding_bytes(config)
    else:
        same = activations.input_of_norm(config) == sizes.compute
        is_in_block = layers > 0 and not offloads and (mode == "full" or same)
        is_sent = topology.place_of_stage(stage - 1) != place
        saved += (is_sent - is_in_block) * sizes.residual
    if stage == topology.stages - 1:
        saved += activations.norm_bytes(config)
        loss = activations.loss_bytes(config)
    else:
        saved += sizes.residual
    return _Saved(activations=max(0, saved), loss=loss, on_host=in_blocks if offloads else 0)


def _buffers(config: Run, topology: Topology, place: int, units: tuple[Unit, ...]) -> int:
    """Return the bytes of message buffers.

    For a gradient from another stage, FrugalStage of torch_gpt2/parallel/private_api.py has a
    buffer only while it is needed. FSDP2 copies a unit into and out of one message, and keeps the
    unit's whole gradients beside the message that reduces them.
    """
    received = 0
    if topology.pipeline > 1:
        schedule, micro_batches = config.parallel.pipeline_schedule, config.train.accumulation_steps
        received = (
            gradients_at_most(schedule, topology, place, micro_batches) * config.sizes.residual
        )
    largest = max(unit.elements for unit in units)
    held, reduced = BYTES[config.precision.parameters], BYTES[config.precision.reduction]
    if is_fully_sharded(config):
        return received + largest * (held + held + reduced)
    if config.engine == "deepspeed" and config.parallel.zero_stage in (1, 2):
        in_type = config.parallel.zero_stage == 1 and has_low_gradients(config)
        return received + _DEEPSPEED_BUCKET * (reduced if in_type else held)
    is_ddp = shard_ranks(config) == topology.pipeline == 1 < topology.data
    if is_ddp and reduced < held:
        return received + _BUCKET // 4 * reduced
    return received


_DEEPSPEED_BUCKET = 500_000_000
"""Elements of the buffer that DeepSpeed's ZeRO 1 and 2 allocate in each step, whatever the model:
the default of its reduce_bucket_size.
"""
_BUCKET = 25 * 2**20
"""Bytes of DDP's buckets. Gradients are views of them; sent in another type, one is copied at a
time.
"""

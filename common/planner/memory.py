"""What each pipeline rank holds, in bytes: weights, gradients, optimizer state, activations, loss
and buffers; its tensor and data-parallel ranks hold as much.

How ZeRO (arXiv 1910.02054) is met on torch's native engine, by FSDP2: each rank keeps its rows of
every parameter, in float32. In stages 1 and 2, and in a pipeline, parameters are gathered, in the
type of precision.parameters, for the passes of a step, in stage 3 a block at a time. Gradients of
several micro batches add up whole in stage 1, and in a pipeline; else each block's are reduced as
its backward pass ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

from common.config.resolved import ResolvedModel
from common.config.schema import OptimizerConfig
from common.parallel.pipeline import gradients_at_most, held_at_most
from common.parallel.resolved_run import ResolvedRun
from common.parallel.sharding import local_shape, split_dim
from common.parallel.sizes import BYTES
from common.parallel.topology import Topology
from common.planner import activations
from common.weights.names import EMBEDDING, parameter_shapes

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""By name."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device. What comes and goes is counted where it is most."""

    weights: int
    """As the rank's own, which ZeRO may have cut."""
    gathered: int = 0
    """Whole parameters beside them, under ZeRO."""
    gradients: int
    optimizer: int
    """Moments, of whole weights below float32 the float32 copy, and Adam's step of 4 bytes a
    tensor.
    """
    activations: int
    """What forward passes leave for backward passes, of all micro batches on their way at once."""
    loss: int
    """Gradients that the loss finds in its forward pass, for as many micro batches."""
    working: int
    """What comes and goes within a pass: logits, recomputed activations, gradients between
    layers.
    """
    communication: int
    """Buffers of messages: gathered and reduced blocks, gradients that other stages have sent."""
    shared: int = 0
    """What gradients take of the room of activations: with one micro batch a step they come as
    those go.
    """

    @property
    def state(self) -> int:
        """Model and optimizer, without what depends on the batch."""
        return self.weights + self.gathered + self.gradients + self.optimizer

    @property
    def parts(self) -> dict[str, int]:
        """All but ``shared``, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "shared"
        }

    @property
    def peak(self) -> int:
        return sum(self.parts.values()) - self.shared


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that travel together: those of a block, or all others of the rank. ``shapes`` are
    one tensor-parallel rank's.
    """

    shapes: Shapes
    count: int = 1

    @cached_property
    def elements(self) -> int:
        """Of one of them."""
        return self.share(1)

    @cached_property
    def replicated(self) -> int:
        """Elements that every tensor-parallel rank holds."""
        return sum(math.prod(shape) for name, shape in self.shapes if split_dim(name) is None)

    def share(self, ranks: int) -> int:
        """Elements of one of them on the fullest rank, each parameter cut along its first
        dimension.
        """
        return sum(-(-rows // ranks) * width for rows, width in self._matrices)

    @cached_property
    def _matrices(self) -> tuple[tuple[int, int], ...]:
        return tuple((shape[0], math.prod(shape[1:])) for _, shape in self.shapes)


def units_of(config: ResolvedRun, topology: Topology, place: int) -> tuple[Unit, ...]:
    """Parameters of the pipeline rank at this place: its blocks, and what it has of embeddings and
    final norm.
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
    """Of one tensor-parallel rank with so many blocks, and with what else begins with one of
    ``held``.
    """
    whole = parameter_shapes(model.model_copy(update={"num_layers": 1}))
    whole[EMBEDDING] = (rows, whole[EMBEDDING][1])
    shapes = [(name, local_shape(name, shape, tensor)) for name, shape in whole.items()]
    blocks = Unit(shapes=tuple(item for item in shapes if item[0].startswith("h.")), count=layers)
    others = Unit(shapes=tuple(item for item in shapes if item[0].startswith(held)))
    return (blocks, others) if held else (blocks,)


def shard_ranks(config: ResolvedRun) -> int:
    """Data-parallel ranks over which ZeRO cuts; 1 where nothing is cut."""
    parallel = config.parallel
    return (parallel.shard_size or parallel.data_parallel) if parallel.zero_stage else 1


def is_fully_sharded(config: ResolvedRun) -> bool:
    """Whether FSDP2 does the cutting, parameter by parameter; DeepSpeed and MindSpore cut what they
    have in a row.
    """
    return config.backend == "torch" and config.engine == "native" and shard_ranks(config) > 1


def keeps_whole_gradients(config: ResolvedRun) -> bool:
    """Whether gradients of several micro batches add up before ranks exchange them."""
    parallel, several = config.parallel, config.train.accumulation_steps > 1
    if shard_ranks(config) == 1:
        return True
    if not is_fully_sharded(config):
        return parallel.zero_stage == 1
    return several and (parallel.zero_stage == 1 or parallel.pipeline_stage > 1)


def memory_of(config: ResolvedRun, topology: Topology, place: int) -> Memory:
    """Of the pipeline rank at this place."""
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
    tensors = sum(len(unit.shapes) * unit.count for unit in units)
    moments = (1 if config.optimizer.momentum else 0) if config.optimizer.name == "sgd" else 2
    copy = held < 4 and not sharded  # of ZeRO, section 3.1; FSDP2's weights are that already
    optimizer = (cut if zero else whole) * 4 * (moments + copy) + _step_bytes(
        config.optimizer
    ) * tensors
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
    saved, in_loss = _saved(config, topology, place)
    is_last = place == topology.place_of_stage(topology.stages - 1)
    working = activations.while_in_block(config) if units[0].count else 0
    gradients = (
        whole * (BYTES[config.precision.reduction] if sharded else 4)
        if keeps_whole_gradients(config)
        else cut * 4
    )
    return Memory(
        weights=weights,
        gathered=gathered,
        gradients=gradients,
        optimizer=optimizer,
        activations=saved,
        loss=in_loss,
        working=max(working, activations.while_in_loss(config) if is_last else 0),
        communication=_buffers(config, topology, place, units),
        shared=min(gradients, saved + in_loss) if config.train.accumulation_steps == 1 else 0,
    )


def _step_bytes(optimizer: OptimizerConfig) -> int:
    return 0 if optimizer.name == "sgd" else 4


def _saved(config: ResolvedRun, topology: Topology, place: int) -> tuple[int, int]:
    """Bytes of activations and of the loss, of all micro batches that wait at once."""
    stages = {
        stage: _saved_by_stage(config, topology, stage) for stage in topology.stages_of(place)
    }
    micro_batches = config.train.accumulation_steps
    if topology.pipeline == 1:
        held = dict.fromkeys(stages, 1)
    else:
        sizes = {stage: sum(both) for stage, both in stages.items()}
        held = held_at_most(
            config.parallel.pipeline_schedule, topology, place, micro_batches, sizes
        )
    return sum(held[stage] * stages[stage][0] for stage in stages), sum(
        held[stage] * stages[stage][1] for stage in stages
    )


def _saved_by_stage(config: ResolvedRun, topology: Topology, stage: int) -> tuple[int, int]:
    """Bytes of activations and of the loss that one micro batch leaves. The pipeline keeps what a
    stage has received and what it sends, which are one where the stage after it is on the same
    rank.
    """
    sizes, mode, place = config.sizes, config.train.recompute, topology.place_of_stage(stage)
    layers = len(topology.layers_of_stage(stage, config.model.num_layers))
    saved = layers * activations.of_block(config, mode)
    loss = 0
    if stage == 0:
        saved += activations.of_embedding(config)
    else:
        is_in_block = layers > 0 and (mode == "full" or sizes.norm == sizes.compute)
        is_sent = topology.place_of_stage(stage - 1) != place
        saved += (is_sent - is_in_block) * sizes.residual
    if stage == topology.stages - 1:
        saved += activations.of_norm(config)
        loss = activations.of_loss(config)
    else:
        saved += sizes.residual
    return max(0, saved), loss


def _buffers(config: ResolvedRun, topology: Topology, place: int, units: tuple[Unit, ...]) -> int:
    """Gradients that come from other stages: FrugalStage of torch_gpt2/parallel/private_api.py has
    a buffer for a message while it is needed. FSDP2 copies a unit in and out of one message, and
    has its whole gradients beside the message that reduces them.
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
    is_ddp = shard_ranks(config) == topology.pipeline == 1 < topology.data
    if is_ddp and reduced < held:
        return received + _BUCKET // 4 * reduced
    return received


_BUCKET = 25 * 2**20
"""Bytes of DDP's buckets, whose gradients are views of them; sent in another type, one is copied at
a time.
"""

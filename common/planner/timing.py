"""Bytes that one rank sends in an optimizer step along each axis of the layout, and the time of the step, from a
device's peak rates and five factors.

Messages go along rings (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
2009). Of B bytes over k ranks an all-reduce sends 2 (k - 1) / k B, and a reduce-scatter or an all-gather half of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.accelerators import Accelerator, Hardware
from common.parallel.kernels import is_compiled, keeps_no_scores
from common.parallel.pipeline import bubble
from common.parallel.run import BYTES, Run
from common.parallel.sharding import split_dim
from common.parallel.topology import GroupKind, Topology
from common.planner import activations
from common.planner.memory import Memory, is_fully_sharded, keeps_whole_gradients, units_of


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent by one rank in one step."""

    tensor: float = 0.0
    """All-reduces of activations within layers, vocabulary and loss."""
    sequence: float = 0.0
    """Gathers and reduce-scatters of sequence parallelism, instead of all-reduces, and gradients of whole parameters.
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
    owners = config.parallel.shards if is_fully_sharded(config) else 1
    holders = topology.group(GroupKind.EMBEDDING, place * topology.data * topology.tensor) or [place]
    embedding = all_reduce(4 * sizes.vocabulary * sizes.hidden / topology.tensor, len(holders)) / owners
    # once a step, gradients of parameters that every tensor-parallel rank holds: each of them has
    # seen only a part of the sequence
    replicated = sum(
        unit.count * math.prod(shape)
        for unit in units_of(config, place)
        for name, shape in unit.shapes
        if split_dim(name) is None
    )
    replicated_bytes = all_reduce(4 * replicated, topology.tensor) / owners
    shared = config.parallel.sequence_parallel
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
    one = all_reduce(sizes.region, ranks)
    total = 4 * one * topology.layer_count(place, config.model.num_layers)
    if config.train.recompute == "full":
        again = 1.5 if config.parallel.sequence_parallel else 1.0
        total += again * one * activations.recomputed_of_rank(config, place)
    if place == 0:  # sum over the parts of the embedding, in the type of the table
        total += all_reduce(sizes.tokens * sizes.hidden * sizes.held, ranks)
    # gradient of the hidden states; largest logit, sum and target in float32
    if place == topology.place_of_stage(topology.stages - 1):
        total += one + all_reduce(3 * 4 * sizes.tokens, ranks)
    return total


def _data(config: Run, place: int) -> float:
    """Return the bytes of gradients and parameters between data-parallel ranks.

    Without ZeRO each step has an all-reduce of the gradients. With ZeRO it has both halves of one (arXiv 1910.02054,
    section 7). The gradients are reduce-scattered once a step or a micro batch. The parameters are gathered once a
    step; in stage 3 every micro batch gathers those of blocks for the forward and for the backward pass. With hybrid
    sharding the reduced parts are summed over the copies once a step.
    """
    ranks, cut, zero = config.topology.data, config.parallel.shards, config.parallel.zero_stage
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


PRODUCTS = 0.75
"""Part of the peak rate that matrix products reach.

This, attention on both generations, eager elements and the network are the five factors that were
fitted to one half of the published steps in benchmarks/published.csv (docs/plan_accuracy.md).
"""
ATTENTION, ATTENTION_OF_HOPPER = 0.64, 0.33
"""Part of the peak rate that attention in one kernel reaches, with all pairs of a window counted.
Hopper's peak has grown more than its kernels of 2023 and 2024.
"""
ELEMENTS = {"eager": 0.33, "compiled": 0.90}
"""Part of the memory bandwidth that the operations between products reach, with each activation
counted once a pass. Operator by operator it is read and written again. For fused kernels 0.90 is
assumed; with it the kernels of torch's graphs predicted llm.c's speeds (docs/compilation.md).
"""
NETWORK = 0.67
"""Part of the adapters' rate that messages between servers reach."""
RANGES = {"A100": (0.89, 1.27, 170), "H100": (0.74, 1.17, 84), "V100": (0.76, 1.50, 103), "Ascend": (0.58, 1.69, 12)}
"""Measured by planned times, by family: eight of ten published steps lie between, of how many."""
HOST_LINK = 25e9
"""Bytes per second between a device and its host, one way: a PCIe 4 x16 link of 32 GB/s."""
PASSES = 4
"""Number of memory passes over a block's activations.

They are written and read forward, then read backward, where the gradient follows.
"""

FLOAT8_COPIES = {"tensorwise": 19 / 3, "rowwise": 20 / 3}
"""Bytes moved for each input and output of a linear layer, by ``precision.float8``: the search for
the largest value, and the copies in float8. Counted in torch's graphs (gpu_checks.py).
"""
FLOAT8_WEIGHTS = 28.0
"""Bytes moved for each weight of such a layer in every micro batch; likewise. 8 of them are a copy
in bfloat16 that the block's activations contain too.
"""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on a rank. Overlapping parts count by the longer one."""

    products: float
    """Matrix products."""
    elements: float
    """All other operations of a layer, which memory bandwidth limits."""
    waiting: float
    """Bubble of the pipeline."""
    tensor: float
    """Communication within layers, which does not overlap."""
    data: float
    """Communication of gradients and parameters that the last backward pass does not hide."""
    host: float
    """Copies of activations to the host and back, which the computation waits for."""
    pipeline: float
    """Messages between stages, and the gradients of the tied embedding."""
    optimizer: float
    """Reading and writing of weights, gradients and optimizer state, and the sums of gradients over micro batches."""

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


def step_time(config: Run, device: Accelerator, place: int, memory: Memory) -> StepTime:
    """Return the step time of the pipeline rank at this place."""
    topology, traffic = config.topology, traffic_of(config, place)
    micro_batches, schedule = config.train.accumulation_steps, config.parallel.pipeline_schedule
    layers, mode = topology.layer_count(place, config.model.num_layers), config.train.recompute
    peak = device.single_flops if config.precision.compute == "float32" else device.half_flops
    scaling, sizes = config.precision.float8, config.sizes
    of_blocks = peak if scaling == "none" else device.float8_peak()
    of_head = device.float8_peak() if config.precision.float8_head else peak
    again = activations.recomputed_of_rank(config, place)
    is_last = place == topology.place_of_stage(topology.stages - 1)
    # operations of one micro batch: forward, twice as many backward, and what is recomputed;
    # in attention 12 h T for each token and layer (common.training.metrics)
    weights = _linear_weights(config) * (3 * layers + again * (mode == "full"))
    head = 3 * sizes.vocabulary * sizes.hidden * is_last
    attention = (3 * layers + again) * 2 * sizes.seq_length * sizes.hidden
    # written out, attention has two products as any others, and its softmax among the elements
    of_kernel = ATTENTION_OF_HOPPER if device.float8_flops > 0 else ATTENTION
    attends = of_kernel if keeps_no_scores(config, config.hardware) else PRODUCTS
    products = (2 * sizes.tokens / sizes.tensor) * (
        weights / of_blocks / PRODUCTS + head / of_head / PRODUCTS + attention / peak / attends
    )
    moved: float = (layers * PASSES + again * (mode == "full")) * activations.block_bytes(config, "none")
    if is_last:  # float32 logits, written and read twice
        moved += 4 * 4 * sizes.tokens * sizes.vocabulary // sizes.tensor
    if scaling != "none":
        moved += layers * float8_bytes(config)
    compiled = is_compiled(config, Hardware(kind="auto", name=device.name))
    elements = moved / device.bandwidth / ELEMENTS["compiled" if compiled else "eager"]
    work = products + elements
    waiting = bubble(schedule, topology, micro_batches, recomputes=mode == "full")
    within = (traffic.tensor + traffic.sequence) / _speed(device, topology, GroupKind.TENSOR)
    all_work = micro_batches * work + within
    # messages between data-parallel ranks run beside backward passes, two thirds of the work: of
    # the last micro batch where gradients are sent once a step, as behind a pipeline, and of all
    # where ZeRO reduces each one's; in stage 3 forward passes hide gathers too
    zero = config.parallel.zero_stage
    beside = micro_batches * work if zero >= 2 and topology.pipeline == 1 else work
    hidden = beside * (1 if zero == 3 and topology.pipeline == 1 else 2 / 3)
    data = max(0.0, traffic.data / _speed(device, topology, GroupKind.DATA) - hidden)
    between = (traffic.pipeline + traffic.embedding) / _speed(device, topology, GroupKind.PIPELINE)
    # read and write weights, state and gradients once
    updated = 2 * (memory.weights + memory.gradients + memory.optimizer)
    # a sum reads the old one and the gradient, and writes the new one
    summed = 3 * memory.gradients * (micro_batches - 1)
    on_host = config.train.offload_activations * sum(
        activations.blocks_bytes(config, len(topology.layers_of_stage(stage, config.model.num_layers)))
        for stage in topology.stages_of(place)
    )
    return StepTime(
        products=micro_batches * products,
        elements=micro_batches * elements,
        waiting=all_work * waiting / (1 - waiting),
        tensor=within,
        data=data,
        host=micro_batches * 2 * on_host / HOST_LINK,
        pipeline=between,
        optimizer=(updated + summed) / device.bandwidth,
    )


def float8_bytes(config: Run) -> float:
    """Return the bytes that float8 adds to one micro batch in the linear layers of a block."""
    sizes = config.sizes
    # inputs of q, k, v and c_fc and outputs of both c_proj; the other inputs and outputs
    whole, split = 6 * sizes.hidden, 4 * sizes.hidden + 2 * sizes.ffn
    copies = FLOAT8_COPIES[config.precision.float8] * (whole * sizes.tensor + split) * sizes.tokens
    return (copies + FLOAT8_WEIGHTS * _linear_weights(config)) / sizes.tensor


def _linear_weights(config: Run) -> int:
    """Return the weights of one block's linear layers."""
    return 4 * config.sizes.hidden**2 + 2 * config.sizes.hidden * config.sizes.ffn


def _speed(device: Accelerator, topology: Topology, kind: GroupKind) -> float:
    """Return the bytes per second that each rank of a group sends.

    Within a server it is the link's rate. Rings over several servers leave a server by as many
    adapters as the group has devices there. A message between stages has one.
    """
    group, server = topology.group(kind, 0), device.server_devices
    if group[-1] < server:
        return device.link
    beside = 1 if kind is GroupKind.PIPELINE else -(-server // (group[1] - group[0]))
    return NETWORK * min(device.link, beside * device.network)

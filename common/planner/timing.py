"""Estimate of the time of an optimizer step from a device's peak rates and five factors."""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.accelerators import Accelerator, Hardware
from common.parallel.kernels import keeps_no_scores
from common.parallel.pipeline import bubble
from common.parallel.run import Run
from common.parallel.topology import GroupKind, Topology
from common.planner import activations
from common.planner.communication import Traffic
from common.planner.memory import Memory
from common.resolve.compilation import is_compiled

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
    """Reading and writing of weights, gradients and optimizer state, and the sums of gradients over
    micro batches.
    """

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


def step_time(config: Run, device: Accelerator, place: int, memory: Memory, traffic: Traffic) -> StepTime:
    """Return the step time of the pipeline rank at this place."""
    topology = config.topology
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
    waiting = bubble(schedule, topology, micro_batches, recomputes=mode == "full") if topology.pipeline > 1 else 0.0
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

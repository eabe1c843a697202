"""What a run will be, before anything starts: ranks, batch, and on each rank the parameters and the memory of its state.

Arithmetic on a resolved config alone: no framework, no device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from common.cluster.places import Place
from common.config.resolve import padded_vocabulary
from common.config.schema import RunConfig
from common.parallel.batch import BatchPlan, plan_batch
from common.parallel.topology import GroupKind, Topology
from common.weights.names import EMBEDDING, count_parameters, parameter_shapes

# Split over tensor ranks: the embedding by rows of the vocabulary; q, k, v and c_fc by outputs, so bias too; both c_proj by inputs,
# so their bias is whole on every rank. All else is whole on every rank (Megatron-LM, arXiv 1909.08053, section 3).
_SPLIT_OVER_TENSOR = re.compile(
    r"wte\.weight|h\.\d+\.(attn\.[qkv]_proj\.(weight|bias)|mlp\.c_fc\.(weight|bias)|(attn|mlp)\.c_proj\.weight)"
)
_LISTED = 64


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What each rank of one pipeline stage holds; its tensor and data-parallel ranks hold equally much. Memory in bytes."""

    layers: range
    parameters: int
    """Elements, with padding, and with the last stage's own copy of the tied embedding; before ZeRO splits anything."""
    weights: int
    gradients: int
    optimizer: int
    """Moments and, of weights below float32, the float32 copy."""

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's arithmetic. ``parameters`` are the model's: no padding, nothing counted twice."""

    topology: Topology
    batch: BatchPlan
    tokens_per_step: int
    parameters: int
    stages: tuple[StagePlan, ...]


def make_plan(config: RunConfig) -> Plan:
    """Needs a config that resolve_config returned. Raises ConfigError where layers do not divide into stages."""
    topology, train = Topology.from_config(config.parallel), config.train
    batch = plan_batch(
        global_batch=train.global_batch_size,
        micro_batch=train.micro_batch_size,
        accumulation=train.accumulation_steps,
        data_parallel=topology.data,
    )
    elements = _elements_by_stage(config, topology)
    return Plan(
        topology=topology,
        batch=batch,
        tokens_per_step=batch.global_batch * config.model.seq_length,
        parameters=count_parameters(config.model),
        stages=tuple(
            _plan_stage(config, topology.layers_of_stage(stage, config.model.num_layers), elements[stage])
            for stage in range(topology.pipeline)
        ),
    )


def _elements_by_stage(config: RunConfig, topology: Topology) -> list[int]:
    """Elements on one rank of each stage."""
    found = [0] * topology.pipeline
    for name, shape in parameter_shapes(config.model).items():
        if name == EMBEDDING:
            shape = (padded_vocabulary(config), *shape[1:])
            stages: Sequence[int] = topology.embedding_stages
        elif name.startswith("h."):
            stages = (topology.stage_of_layer(int(name.split(".")[1]), config.model.num_layers),)
        else:
            stages = (topology.pipeline - 1,) if name.startswith("ln_f.") else (0,)
        split = topology.tensor if _SPLIT_OVER_TENSOR.fullmatch(name) else 1
        for stage in stages:
            found[stage] += math.prod(shape) // split
    return found


def _plan_stage(config: RunConfig, layers: range, elements: int) -> StagePlan:
    """Gradients reach the optimizer in float32 whatever the weights are, and so are its moments (ZeRO, arXiv 1910.02054, section 3.1)."""
    zero, optimizer = config.parallel.zero_stage, config.optimizer
    half = config.precision.parameters != "float32"
    moments = (1 if optimizer.momentum else 0) if optimizer.name == "sgd" else 2

    def share(zero_stage: int) -> int:
        return -(-elements // (config.parallel.data_parallel or 1)) if zero >= zero_stage else elements

    return StagePlan(
        layers=layers,
        parameters=elements,
        weights=share(3) * (2 if half else 4),
        gradients=share(2) * 4,
        optimizer=share(1) * 4 * (moments + half),
    )


def describe_plan(plan: Plan, config: RunConfig, *, all_ranks: bool = False, places: Sequence[Place] = ()) -> str:
    """The plan as text: the arithmetic, a table of stages, a table of ranks, the middle ones of more than 64 only with ``all_ranks``.

    places: of every rank in order, where they are known: its host and device are shown too.
    """
    topology, batch = plan.topology, plan.batch
    lines = [
        f"world: {topology}",
        f"batch: {batch} samples; {plan.tokens_per_step:,} tokens a step",
        f"model: {plan.parameters:,} parameters; vocabulary {config.model.vocab_size}, padded to {padded_vocabulary(config)}",
    ]
    if topology.pipeline > 1:
        wait = topology.pipeline - 1
        # one forward, one backward: (p - 1) / (m + p - 1) of a step (Megatron-LM, arXiv 2104.04473, section 2.2.1)
        lines.append(f"pipeline: each stage waits {wait / (batch.accumulation + wait):.0%} of a step for the others")
    parameters, stage = config.precision.parameters, config.parallel.zero_stage
    lines += [
        "",
        f"Each rank of a stage holds (GB = 10^9 bytes; weights {parameters}, gradients and {config.optimizer.name}'s state float32;"
        f" ZeRO stage {stage}; activations come on top):",
        *_table(("stage", "ranks", "layers", "parameters", "weights", "gradients", "optimizer", "GB"), _stage_rows(plan)),
        *_room(plan, config),
        "",
        *_table((*_RANK, *(_PLACE if places else ()), *(f"{kind} group" for kind in _SHOWN)), _rank_rows(topology, all_ranks, places)),
    ]
    return "\n".join(lines) + "\n"


_RANK = ("rank", "stage", "data", "tensor")
_PLACE = ("host", "device")
_SHOWN = (GroupKind.TENSOR, GroupKind.DATA, GroupKind.PIPELINE, GroupKind.EMBEDDING)


def _room(plan: Plan, config: RunConfig) -> list[str]:
    """What context.max_device_memory, in 2^30 bytes as both backends read it, leaves to the fullest rank."""
    limit = config.context.max_device_memory
    if limit is None:
        return []
    room = float(limit.removesuffix("GB")) * 2**30 - max(stage.memory for stage in plan.stages)
    if room > 0:
        return [f"context.max_device_memory={limit} leaves {room / 1e9:.2f} GB for activations on the fullest rank"]
    return [
        f"does not fit: context.max_device_memory={limit} is {-room / 1e9:.2f} GB short; raise model_parallel, pipeline_stage or zero_stage"
    ]


def _stage_rows(plan: Plan) -> Iterable[tuple[str, ...]]:
    size = plan.topology.data * plan.topology.tensor
    for number, stage in enumerate(plan.stages):
        sizes = (f"{value / 1e9:.2f}" for value in (stage.weights, stage.gradients, stage.optimizer, stage.memory))
        ranks = range(number * size, (number + 1) * size)
        yield str(number), _ranks(ranks), _ranks(stage.layers), f"{stage.parameters:,}", *sizes


def _rank_rows(topology: Topology, all_ranks: bool, places: Sequence[Place]) -> Iterable[tuple[str, ...]]:
    world, cut = topology.world_size, _LISTED // 2
    shorten = world > _LISTED and not all_ranks
    for rank in chain(range(cut), (None,), range(world - cut, world)) if shorten else range(world):
        if rank is None:
            yield ("...",)
            continue
        at = topology.coordinates(rank)
        groups = (_ranks(topology.group(kind, rank)) for kind in _SHOWN)
        where = (places[rank].host, str(places[rank].device_id)) if places else ()
        yield str(rank), str(at.pipeline), str(at.data), str(at.tensor), *where, *groups


def _ranks(numbers: Sequence[int]) -> str:
    """``0-7`` without gaps, else ``0 2 4 6``; of more than four with equal gaps ``0 2 .. 14``."""
    if not numbers:
        return "-"
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1 > 0:
        return f"{first}-{last}"
    return f"{first} {numbers[1]} .. {last}" if len(numbers) > 4 else " ".join(map(str, numbers))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Columns aligned to the right."""
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells if column < len(row)) for column in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in cells]

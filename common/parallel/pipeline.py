"""Arithmetic of pipeline schedules: order of passes on each rank, memory held meanwhile, and bubble.

The orders are those of torch.distributed.pipelining, which runs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from common.parallel.topology import Topology


class Pass(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of weights."""
    INPUT = "I"
    """Gradients of inputs only, which the stage before waits for."""
    WEIGHT = "W"
    """Gradients of weights; saved activations are kept until here."""


@dataclass(frozen=True, kw_only=True)
class Action:
    what: Pass
    stage: int
    micro_batch: int


def schedule_error(schedule: str, topology: Topology, micro_batches: int) -> str | None:
    """Return why this many micro batches do not fit the schedule, or None.

    The conditions are those of torch.distributed.pipelining.
    """
    ranks = topology.pipeline
    if ranks == 1 or schedule in ("gpipe", "zbv_zero_bubble"):
        return None
    rounds = max(1, micro_batches // ranks)
    if schedule == "1f1b":
        is_wrong, needs = micro_batches < ranks, f"at least {ranks} micro batches, one per stage"
    else:
        is_wrong, needs = micro_batches % rounds > 0, f"micro batches in {rounds} equal rounds"
    return f"{schedule} needs {needs}, not {micro_batches}" if is_wrong else None


def order_of_rank(schedule: str, topology: Topology, place: int, micro_batches: int) -> list[Action]:
    """Return the passes of the pipeline rank at this place in one step, in order.

    ``micro_batches`` must be accepted by ``schedule_error``.
    """
    match schedule:
        case "gpipe" | "1f1b":
            return list(_one_stage(place, micro_batches, _waiting(schedule, topology, place, micro_batches)))
        case "zbv_zero_bubble":
            return list(_v_shape(topology, place, micro_batches))
        case _:
            return list(_interleaved(topology, place, micro_batches, splits=schedule == "interleaved_zero_bubble"))


def _waiting(schedule: str, topology: Topology, place: int, micro_batches: int) -> int:
    """Return the micro batches in progress at once on a rank with one stage."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, topology.pipeline - place)


def _one_stage(stage: int, micro_batches: int, waiting: int) -> Iterator[Action]:
    """Run ``waiting`` forward passes before the first backward pass, then one of each in turn."""
    for number in range(micro_batches + waiting):
        if number >= waiting:
            yield Action(what=Pass.BACKWARD, stage=stage, micro_batch=number - waiting)
        if number < micro_batches:
            yield Action(what=Pass.FORWARD, stage=stage, micro_batch=number)


def _interleaved(topology: Topology, place: int, micro_batches: int, *, splits: bool) -> Iterator[Action]:
    """Take a round of micro batches through each stage of the rank before the next round.

    Source: Megatron, arXiv 2104.04473, section 2.2. With ``splits``, weight gradients lag behind by
    as many passes as there are ranks before this one (ZB-H1, arXiv 2401.10241, section 2.3).
    """
    virtual, stages, total = (topology.virtual, topology.stages_of(place), micro_batches * topology.virtual)
    per_round, ahead = _rounds(topology, place, micro_batches, splits=splits)
    seen: Counter[tuple[Pass, int]] = Counter()

    def step(what: Pass, stage: int) -> Action:
        number = seen[what, stage]
        seen[what, stage] += 1
        return Action(what=what, stage=stage, micro_batch=number)

    def backward_stage(number: int) -> int:
        return stages[virtual - 1 - number // per_round % virtual]

    weights = count()
    for number in range(total + ahead):
        if number < total:
            yield step(Pass.FORWARD, stages[number // per_round % virtual])
        if number >= ahead:
            yield step(Pass.INPUT if splits else Pass.BACKWARD, backward_stage(number - ahead))
        if splits and number >= ahead + place:
            yield step(Pass.WEIGHT, backward_stage(next(weights)))
    for number in range(next(weights), total) if splits else ():
        yield step(Pass.WEIGHT, backward_stage(number))


def _rounds(topology: Topology, place: int, micro_batches: int, *, splits: bool) -> tuple[int, int]:
    """Return two sizes of interleaved schedules.

    They are the micro batches of a round, and the passes of a rank before its first backward pass.
    """
    ranks, virtual = topology.pipeline, topology.virtual
    per_round = micro_batches // max(1, micro_batches // ranks)
    ahead = (virtual - 1) * per_round + (1 if splits else 2) * (ranks - 1 - place)
    return per_round, min(micro_batches * virtual, ahead)


def _v_shape(topology: Topology, place: int, micro_batches: int) -> Iterator[Action]:
    """Order of ZB-V (arXiv 2401.10241, section 6), where a rank has the stage at its place from either end."""
    ranks = topology.pipeline
    down, up = topology.stages_of(place)
    # with fewer micro batches, their places stay empty
    planned = max(2 * ranks - 1, micro_batches)
    seen: Counter[tuple[Pass, int]] = Counter()

    def steps(stage: int, *passes: Pass) -> Iterator[Action]:
        for what in passes:
            number = seen[what, stage]
            seen[what, stage] += 1
            if number < micro_batches:
                yield Action(what=what, stage=stage, micro_batch=number)

    both = (Pass.INPUT, Pass.WEIGHT)
    for _ in range(2 * (ranks - place) - 1):
        yield from steps(down, Pass.FORWARD)
    for _ in range(place):
        yield from steps(up, Pass.FORWARD)
        yield from steps(down, Pass.FORWARD)
    for _ in range(ranks - place):
        yield from steps(up, Pass.FORWARD, *both)
    while seen[Pass.FORWARD, up] < planned:
        if seen[Pass.FORWARD, down] < planned:
            yield from steps(down, Pass.FORWARD)
        yield from steps(down, *both)
        yield from steps(up, Pass.FORWARD, *both)
    for _ in range(place):
        yield from steps(down, Pass.INPUT)
        yield from steps(up, Pass.INPUT)
    for _ in range(ranks - place):
        yield from steps(down, *both)
    for stage in (up, down):
        while seen[Pass.WEIGHT, stage] < planned:
            yield from steps(stage, Pass.WEIGHT)


def held_at_most(
    schedule: str, topology: Topology, place: int, micro_batches: int, sizes: Mapping[int, int]
) -> dict[int, int]:
    """Return the micro batches waiting for their backward pass on each stage, at the peak of memory.

    sizes: bytes that one micro batch keeps, by stage.
    """
    stages = topology.stages_of(place)
    moments = _held_at_turns(schedule, topology, place, micro_batches)
    most = max(moments, key=lambda held: sum(sizes[stage] * number for stage, number in zip(stages, held, strict=True)))
    return dict(zip(stages, most, strict=True))


def _held_at_turns(schedule: str, topology: Topology, place: int, micro_batches: int) -> Iterator[tuple[int, ...]]:
    """Yield the micro batches held by each stage of a rank, at moments that include the peak of memory.

    This holds for any sizes of the stages: between these moments the bytes grow or shrink evenly.
    """
    if schedule in ("gpipe", "1f1b"):
        yield (_waiting(schedule, topology, place, micro_batches),)
        return
    if schedule == "zbv_zero_bubble":
        down = 2 * topology.pipeline - 1 - place
        yield min(micro_batches, down), min(micro_batches, place + 1)
        if micro_batches > down:
            yield down + 1, place
        return
    splits, virtual, total = (schedule == "interleaved_zero_bubble", topology.virtual, micro_batches * topology.virtual)
    per_round, ahead = _rounds(topology, place, micro_batches, splits=splits)
    lag = ahead + (place if splits else 0)

    def passed(count: int, turn: int) -> int:
        """Return how many of the first ``count`` passes are of the stage with this turn in a round."""
        rounds, rest = divmod(count, per_round * virtual)
        return rounds * per_round + min(max(rest - turn * per_round, 0), per_round)

    first, last = min(lag, total - 1), min(lag + per_round * virtual, total) - 1
    forward_turns = range(first - first % per_round + per_round - 1, last, per_round)
    for number in sorted({first, last, *forward_turns, *range(lag, last, per_round)}):
        done = max(0, number - lag)
        yield tuple(passed(number + 1, turn) - passed(done, virtual - 1 - turn) for turn in range(virtual))


def gradients_at_most(schedule: str, topology: Topology, place: int, micro_batches: int) -> int:
    """Return the most gradients from other ranks that a rank holds at once.

    A gradient is held from the backward pass of its stage on, or until the pass of the weights
    where the backward pass is split. One or two more may come early.
    """
    ranks, stages = topology.pipeline, topology.stages_of(place)
    sent = [stage + 1 < topology.stages and topology.place_of_stage(stage + 1) != place for stage in stages]
    if not any(sent) or not schedule.endswith("zero_bubble"):
        return int(any(sent))
    if schedule == "zbv_zero_bubble":
        planned = max(2 * ranks - 1, micro_batches)
        # at the end, input gradients of ``place`` micro batches reach both stages before their weight gradients
        begun = (planned - ranks, planned - place)
        late = sum(
            min(max(micro_batches - number, 0), place) for number, is_sent in zip(begun, sent, strict=True) if is_sent
        )
        return max(1, late + (sent[0] and micro_batches > planned - ranks + place))
    per_round, _ = _rounds(topology, place, micro_batches, splits=True)
    return min(place + 1, sum(sent) * (micro_batches if all(sent) else per_round))


def bubble(schedule: str, topology: Topology, micro_batches: int, *, recomputes: bool = False) -> float:
    """Return the part of a step in which a rank waits, with equal stages and free communication.

    The forward pass of a stage, its input gradients and its weight gradients take one unit each (arXiv 2401.10241,
    section 3). Recomputation of whole blocks takes one more.

    A step has (p - 1) / v passes of waiting, each of forward + backward (GPipe, arXiv 1811.06965, section 2.3; 1F1B and
    interleaved, arXiv 2104.04473, sections 2.2.1 and 2.2.2). Where the backward pass is split, each is of forward +
    inputs - weights (ZB-H1, arXiv 2401.10241, table 1). ZB-V waits only for the first rank's lead over the last, since
    every step ends with a norm of all gradients.
    """
    ranks = topology.pipeline
    backward_inputs = 2 if recomputes else 1
    work = micro_batches * topology.virtual * (2 + backward_inputs)
    waiting = (ranks - 1) * (backward_inputs if schedule.endswith("zero_bubble") else 2 + backward_inputs)
    return waiting / (work + waiting)

"""Orders of passes against torch.distributed.pipelining's own; bubbles against a pipeline played with those."""

import random
import time
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from common.parallel.pipeline import bubble, gradients_at_most, held_at_most, order_of_rank, schedule_error
from common.parallel.topology import Topology

SPLIT = ("interleaved_1f1b", "interleaved_zero_bubble")
CASES = [
    *product(("gpipe", "1f1b"), (1,), (2, 3, 4), (1, 2, 3, 6, 13)),
    *product(SPLIT, (1, 2, 3), (2, 4), (1, 4, 6, 12, 24)),
    *product(("zbv_zero_bubble",), (2,), (2, 3, 4), (1, 3, 7, 24)),
]
Step = tuple[str, int, int]
PASSES = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def layout(schedule: str, virtual: int, ranks: int) -> Topology:
    return Topology(pipeline=ranks, virtual=virtual, v_shape=schedule == "zbv_zero_bubble")


def torch_orders(schedule: str, virtual: int, ranks: int, micro_batches: int) -> list[list[Step]]:
    """Actions of torch's class on each rank; its constructor wants a running process group."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = {
        "gpipe": schedules.ScheduleGPipe,
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv_zero_bubble": schedules.ScheduleZBVZeroBubble,
    }[schedule]
    theirs: Any = kind.__new__(kind)
    theirs.pp_group_size, theirs.n_local_stages = ranks, virtual
    theirs._num_stages = theirs.num_stages = ranks * virtual
    theirs._n_microbatches, theirs.number_of_rounds = micro_batches, max(1, micro_batches // ranks)
    theirs.microbatches_per_round = micro_batches // theirs.number_of_rounds
    if schedule == "gpipe":
        orders = list(theirs._get_pipeline_order().values())
    else:
        orders = [theirs._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [
        [
            (PASSES[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in order
            if a and a.computation_type.name in PASSES
        ]
        for order in orders
    ]


def expected(schedule: str, virtual: int, ranks: int, micro_batches: int) -> list[list[Step]]:
    """1F1B by the rule (arXiv 2104.04473, figure 4): torch's listing of this schedule misnumbers
    the last rank's micro batches.
    """
    if schedule != "1f1b":
        return torch_orders(schedule, virtual, ranks, micro_batches)
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        order: list[Step] = [("F", rank, number) for number in range(ahead)]
        for number in range(micro_batches):
            order += [("F", rank, ahead + number)] * (ahead + number < micro_batches)
            order.append(("B", rank, number))
        orders.append(order)
    return orders


def play(orders: list[list[Step]], stages: int) -> int:
    """Units of time until every rank has done all it has to, each step as soon as what it needs is there."""
    done: dict[Step, int] = {}
    clock, at = [0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        before = sum(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                what, stage, number = order[at[rank]]
                needs = [("F", stage - 1, number)] if what == "F" and stage else []
                if what in "BI":
                    later = [(what, stage + 1, number)] if stage < stages - 1 else []
                    needs = [("F", stage, number), *later]
                if any(need not in done for need in needs):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + UNITS[what]
                done[what, stage, number] = clock[rank]
                at[rank] += 1
        assert sum(at) > before, "each rank waits for another"
    return max(clock)


@pytest.mark.parametrize(("schedule", "virtual", "ranks", "micro_batches"), CASES)
def test_orders_bubbles_and_what_is_held(schedule: str, virtual: int, ranks: int, micro_batches: int) -> None:
    """Held are the largest for any sizes of stages, and at one moment where sizes are equal."""
    topology = layout(schedule, virtual, ranks)
    if schedule_error(schedule, topology, micro_batches):
        return
    orders = expected(schedule, virtual, ranks, micro_batches)
    draw = random.Random(f"{schedule} {virtual} {ranks} {micro_batches}")
    for rank, order in enumerate(orders):
        found = order_of_rank(schedule, topology, rank, micro_batches)
        assert [(a.what.value, a.stage, a.micro_batch) for a in found] == order
        for sizes in (lambda: 1, lambda: draw.randint(1, 9), lambda: draw.randint(1, 9)):
            given = {stage: sizes() for stage in topology.stages_of(rank)}
            worst, gradients = played(topology, rank, order, given)
            assert held_at_most(schedule, topology, rank, micro_batches, given) == worst
            assert gradients_at_most(schedule, topology, rank, micro_batches) == gradients
    enough = {"gpipe": 1, "1f1b": 1, "zbv_zero_bubble": 2 * ranks - 1}.get(schedule, ranks)
    if micro_batches >= enough:
        busy = 3 * micro_batches * virtual / play(orders, topology.stages)
        assert bubble(schedule, topology, micro_batches) == pytest.approx(1 - busy, rel=1e-12)


def test_the_bubble_of_the_papers() -> None:
    """(p - 1) / (m + p - 1) of GPipe and 1F1B, whatever a backward pass takes; v times less waiting interleaved."""
    for ranks, micro_batches, recomputes in product((1, 4, 16), (16, 1536), (False, True)):
        for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3)):
            topology = Topology(pipeline=ranks, virtual=virtual)
            found = bubble(schedule, topology, micro_batches, recomputes=recomputes)
            waits = (ranks - 1) / (virtual * micro_batches + ranks - 1)
            assert found == pytest.approx(waits)


def test_schedules_say_how_many_micro_batches_they_need() -> None:
    for schedule, ranks, number, message in (
        ("1f1b", 4, 3, "1f1b needs at least 4 micro batches, one per stage, not 3"),
        ("interleaved_1f1b", 4, 9, "interleaved_1f1b needs micro batches in 2 equal rounds, not 9"),
        ("1f1b", 4, 4, None),
        ("gpipe", 4, 1, None),
        ("zbv_zero_bubble", 4, 1, None),
        ("interleaved_1f1b", 4, 3, None),
        ("1f1b", 1, 1, None),
    ):
        assert schedule_error(schedule, Topology(pipeline=ranks), number) == message


def played(topology: Topology, place: int, order: list[Step], sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Micro batches held when they take most, and gradients held, by counting along the order."""
    sent = {
        stage
        for stage in topology.stages_of(place)
        if stage + 1 < topology.stages and topology.place_of_stage(stage + 1) != place
    }
    held, worst, gradients, most_gradients = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0), 0, 0

    def weight(counts: Mapping[int, int]) -> int:
        return sum(sizes[stage] * count for stage, count in counts.items())

    for what, stage, _ in order:
        held[stage] += {"F": 1, "I": 0}.get(what, -1)
        worst = dict(held) if weight(held) > weight(worst) else worst
        gradients += stage in sent and what in ("B", "I")
        most_gradients = max(most_gradients, gradients)
        gradients -= stage in sent and what in ("B", "W")
    return worst, most_gradients


@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT, "zbv_zero_bubble"])
def test_held_activations_need_no_loop_over_micro_batches(schedule: str) -> None:
    """More than some rounds bring nothing new; 127 x 129 micro batches go in 127 rounds of more
    than there are ranks.
    """
    start = time.process_time()
    topology = layout(schedule, 1 if schedule == "1f1b" else 2, 128)
    for place, micro_batches in product((0, 1, 127), (127 * 129, 2**40, 2**40 + 1)):
        sizes = {stage: 1 + stage for stage in topology.stages_of(place)}
        held = held_at_most(schedule, topology, place, micro_batches, sizes)
        assert max(held.values()) <= 3 * 128
        assert gradients_at_most(schedule, topology, place, micro_batches) <= 256
        if micro_batches == 2**40:
            assert held == held_at_most(schedule, topology, place, 2**20, sizes)
    assert time.process_time() - start < 1

"""Batch arithmetic against the rule itself; sizes of a growing batch against megatron-core's
calculator and counting step by step.
"""

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from common.errors import ConfigError
from common.parallel.batch import (
    batch_sizes,
    check_divides,
    check_ramp,
    describe_ramp,
    divisors,
    pad_vocabulary,
    plan_batch,
)

small = st.integers(1, 64)


@given(small, small, small, st.integers(1, 5000))
def test_a_plan_multiplies_out_and_any_one_number_may_be_left_out(
    micro: int, data_parallel: int, accumulation: int, total: int
) -> None:
    given = {"micro_batch": micro, "data_parallel": data_parallel, "accumulation": accumulation}
    whole = given | {"global_batch": micro * data_parallel * accumulation}
    plan = plan_batch(**whole)
    for name in ("micro_batch", "accumulation", "global_batch"):
        assert plan_batch(**whole | {name: None}) == plan
    if total != plan[0]:
        with pytest.raises(ConfigError) as caught:
            plan_batch(**given, global_batch=total)
        assert all(str(number) in str(caught.value) for number in (total, *given.values()))


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert list(divisors(number)) == [part for part in range(1, number + 1) if number % part == 0]


def test_the_nearest_of_many_divisors_are_offered() -> None:
    """At once, also of 6720 divisors and of the largest prime below 2^40."""
    start = time.process_time()
    for part, whole in ((7 * 17 * 31, 963761198400), (2**39 + 1, 2**40 - 87), (55, 5040)):
        with pytest.raises(ConfigError, match=r"; choose \d+(,| or)") as caught:
            check_divides("part", part, "whole", whole)
        assert len(str(caught.value)) < 300
    assert time.process_time() - start < 2
    offered = {*map(int, re.findall(r"\d+", str(caught.value).partition("; choose ")[2]))}
    assert len(offered) == 12 and {48, 56, 60, 63} <= offered
    assert not any(5040 % number for number in offered)


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4, 8, 16]))
def test_padding_is_the_least_multiple(vocab: int, ranks: int) -> None:
    rows = pad_vocabulary(vocab, 128, ranks)
    assert rows % (128 * ranks) == 0 and 0 <= rows - vocab < 128 * ranks


# ---- a batch that grows ----


def drawn(count: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    generator = random.Random(0)
    for _ in range(count):
        start, increment = generator.randint(1, 9), generator.randint(1, 9)
        full = start + increment * generator.randint(1, 12)
        yield full, (start, increment, generator.randint(1, 900))


CASES = [(8, (4, 4, 16)), (16, (4, 4, 10)), (384, (32, 32, 1_465)), (12, (4, 4, 1)), (40, (10, 6, 977)), *drawn(12)]
CASES.append((64, (8, 8, 20)))  # jumps sizes
STEPS = [(32, [[0, 4], [10, 8], [100, 32]]), (32, [[0, 16], [10, 17], [12, 32]]), (8, [[0, 8]])]


def test_the_sizes_are_megatrons() -> None:
    theirs = pytest.importorskip("megatron.core.num_microbatches_calculator", reason="megatron-core is not installed")
    for full, ramp in CASES:
        sizes = batch_sizes(full, ramp)
        calculator = theirs.RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, *ramp)
        for consumed in range(ramp[2] + 2 * full):
            calculator.update(consumed, consistency_check=True)
            assert sizes.at(consumed) == calculator.get_current_global_batch_size()


def test_a_size_begins_with_the_batch_at_or_after_its_first_sample() -> None:
    for full, steps in STEPS:
        sizes = batch_sizes(full, steps)
        for consumed in range(200):
            assert sizes.at(consumed) == [size for first, size in steps if first <= consumed][-1]
        check_ramp(sizes, steps, micro_batch=1, data_parallel=1)
    full, steps = STEPS[0]
    assert batch_sizes(full, steps).micro_batches(2) == (1, 2)
    text = "4 samples, 8 from sample 10, 32 from sample 100; full after step 14"
    assert describe_ramp(batch_sizes(full, steps)) == text  # 4 x 3 and 8 x 11 are 100


@pytest.mark.parametrize(("full", "ramp"), [*CASES, *STEPS])
def test_steps_and_samples_are_those_of_counting(full: int, ramp: Any) -> None:
    sizes = batch_sizes(full, ramp)
    positions = [0]  # the samples consumed before each step
    while positions[-1] <= (ramp[-1] if (full, ramp) in CASES else ramp[-1][0]) + 3 * full:
        positions.append(positions[-1] + sizes.at(positions[-1]))
    assert [sizes.samples_after(step) for step in range(len(positions))] == positions
    step = 0
    for samples in range(positions[-1]):
        step += samples == positions[step + 1]
        assert sizes.steps_within(samples) == step
    assert sizes.steps_of_ramp == next(step for step, position in enumerate(positions) if sizes.at(position) == full)


def test_a_huge_ramp_is_counted_without_walking_through_it() -> None:
    """Steps of 4, 8 and 12 samples, each for a third of 3 * 2^38 samples."""
    third = 2**38
    sizes = batch_sizes(16, (4, 4, 3 * third))
    assert sizes.samples_after(third // 4) == third
    assert sizes.steps_of_ramp == third // 4 + third // 8 - (-third // 12)
    assert "from 4 to 16 samples by 4 over 824,633,720,832 samples" in describe_ramp(sizes)
    sizes = batch_sizes(12, None)
    assert list(sizes.all) == [12] and sizes.at(10**12) == 12 and sizes.steps_of_ramp == 0
    assert (sizes.samples_after(7), sizes.steps_within(95)) == (84, 7)

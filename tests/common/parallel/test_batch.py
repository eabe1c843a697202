"""Batch arithmetic against the rule itself and the numbers of the systems that users come from."""

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from common.errors import ConfigError
from common.parallel.batch import (
    MAX_RANKS,
    check_divides,
    divisors,
    pad_vocabulary,
    plan_batch,
    plan_data_parallel,
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
        assert plan_batch(**{key: value for key, value in whole.items() if key != name}) == plan
    if total != plan.global_batch:
        with pytest.raises(ConfigError) as caught:
            plan_batch(**given, global_batch=total)
        assert all(str(number) in str(caught.value) for number in (total, *given.values()))


@pytest.mark.parametrize(
    ("given", "accumulation"),
    [
        ((512, 8, 2), 32),  # OneFlow 4n8d, tensor 4, pipeline 4
        ((8, 4, 1), 2),  # OneFlow README, single GPU
        ((192, 2, 4), 24),  # MindFormers 13B document layout
        ((1536, 1, 1), 1536),  # FleetX 175B
        ((32, 8, 2), 2),  # ModelZoo 1.3B
    ],
)
def test_known_layouts(given: tuple[int, int, int], accumulation: int) -> None:
    words = dict(zip(("global_batch", "micro_batch", "data_parallel"), given, strict=True))
    assert plan_batch(**words).accumulation == accumulation


def world(size: int, tensor: int, pipeline: int, data: int | None = None) -> int:
    axes = {"model_parallel": tensor, "pipeline_stage": pipeline, "data_parallel": data}
    return plan_data_parallel(world_size=size, **axes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_batch(data_parallel=1), "both left out"),
        (
            lambda: plan_batch(global_batch=10, micro_batch=4, data_parallel=2),
            r"=10 is not a multiple of micro batch x data parallel = 8.*choose 8 or 16",
        ),
        (lambda: world(2**40, 1, 1), f"{MAX_RANKS} is the most"),
        (lambda: world(32, 2, 4, 1), "= 8 processes, but 32 are running"),
        (lambda: world(32, 3, 1), "= 3 does not divide the 32 running processes"),
    ],
)
def test_messages(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert list(divisors(number)) == [part for part in range(1, number + 1) if number % part == 0]


# the largest prime below 2^40, 6720 divisors
@pytest.mark.parametrize("whole", [2**40 - 87, 963761198400])
def test_divisors_of_the_largest_numbers_are_named_at_once(whole: int) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError, match=r"; choose \d+(,| or)") as caught:
        check_divides("part", 2**39 + 1 if whole % 2 else 7 * 17 * 31, "whole", whole)
    assert time.process_time() - start < 2
    assert len(str(caught.value)) < 300


def test_the_nearest_of_many_divisors_are_offered() -> None:
    with pytest.raises(ConfigError, match=r"; choose (.*), or another$") as caught:
        check_divides("part", 55, "whole", 5040)
    offered = {*map(int, re.findall(r"\d+", str(caught.value).partition("; choose ")[2]))}
    assert len(offered) == 12 and {48, 56, 60, 63} <= offered
    assert not any(5040 % number for number in offered)


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4, 8, 16]))
def test_padding_is_the_least_multiple(vocab: int, ranks: int) -> None:
    rows = pad_vocabulary(vocab, 128, ranks)
    assert rows % (128 * ranks) == 0 and 0 <= rows - vocab < 128 * ranks

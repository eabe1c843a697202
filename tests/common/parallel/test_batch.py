"""Batch arithmetic against the rule itself and the numbers of the systems that users come from."""

import re
import time

import pytest
from hypothesis import given, strategies as st

from common.errors import ConfigError
from common.parallel.batch import (
    check_divides,
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
        assert plan_batch(**{key: value for key, value in whole.items() if key != name}) == plan
    if total != plan.global_batch:
        with pytest.raises(ConfigError) as caught:
            plan_batch(**given, global_batch=total)
        assert all(str(number) in str(caught.value) for number in (total, *given.values()))


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

"""Sizes of a growing batch, against megatron-core's calculator and counting step by step."""

import random

import pytest

from common.errors import ConfigError
from common.parallel.batch import plan_batch
from common.parallel.ramp import BatchSizes, batch_sizes, check_ramp, describe_ramp, micro_batches

RAMPS = {
    "one increment": (8, (4, 4, 16)),
    "thirds": (16, (4, 4, 10)),
    "long": (1536, (32, 32, 5_859)),
    "jumps sizes": (64, (8, 8, 20)),
    "one sample": (12, (4, 4, 1)),
    "unaligned": (40, (10, 6, 977)),
}


def drawn(count: int) -> dict[str, tuple[int, tuple[int, int, int]]]:
    generator = random.Random(0)
    found = {}
    for number in range(count):
        start, increment = generator.randint(1, 9), generator.randint(1, 9)
        full = start + increment * generator.randint(1, 12)
        found[f"drawn {number}"] = (full, (start, increment, generator.randint(1, 900)))
    return found


CASES = RAMPS | drawn(40)
STEPS = {
    "three": (32, [[0, 4], [10, 8], [100, 32]]),
    "jumps a size": (32, [[0, 16], [10, 17], [12, 32]]),
    "one": (8, [[0, 8]]),
}


def walk(sizes: BatchSizes, end: int) -> list[int]:
    """The samples consumed before each step, until ``end`` is passed."""
    positions = [0]
    while positions[-1] <= end:
        positions.append(positions[-1] + sizes.at(positions[-1]))
    return positions


@pytest.mark.parametrize("case", CASES)
def test_the_sizes_are_megatrons(case: str) -> None:
    theirs = pytest.importorskip(
        "megatron.core.num_microbatches_calculator", reason="megatron-core is not installed"
    )
    full, ramp = CASES[case]
    sizes = batch_sizes(full, ramp)
    calculator = theirs.RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, *ramp)
    for consumed in range(ramp[2] + 2 * full):
        calculator.update(consumed, consistency_check=True)
        assert sizes.at(consumed) == calculator.get_current_global_batch_size() == calculator.get()


@pytest.mark.parametrize("case", STEPS)
def test_a_size_begins_with_the_batch_at_or_after_its_first_sample(case: str) -> None:
    full, steps = STEPS[case]
    sizes = batch_sizes(full, steps)
    for consumed in range(200):
        assert sizes.at(consumed) == [size for first, size in steps if first <= consumed][-1]
    plan = plan_batch(global_batch=full, micro_batch=1, data_parallel=1)
    check_ramp(plan, steps)
    if case == "three":
        assert micro_batches(full, steps, 2) == (1, 2)
        text = "4 samples, 8 from sample 10, 32 from sample 100; full after step 14"
        assert describe_ramp(sizes) == text  # 4 x 3 and 8 x 11 are 100


@pytest.mark.parametrize("case", CASES | STEPS)
def test_steps_and_samples_are_those_of_counting(case: str) -> None:
    full, ramp = (CASES | STEPS)[case]
    sizes = batch_sizes(full, ramp)
    positions = walk(sizes, (ramp[2] if case in CASES else ramp[-1][0]) + 3 * full)
    assert [sizes.samples_after(step) for step in range(len(positions))] == positions
    step = 0
    for samples in range(positions[-1]):
        step += samples == positions[step + 1]
        assert sizes.steps_within(samples) == step
    assert sizes.steps_of_ramp == next(
        step for step, position in enumerate(positions) if sizes.at(position) == full
    )


def test_a_constant_size_is_a_product() -> None:
    sizes = batch_sizes(12, None)
    assert list(sizes.all) == [12] and sizes.at(0) == sizes.at(10**12) == 12
    assert sizes.samples_after(7) == 84 and sizes.steps_within(95) == 7
    assert sizes.steps_of_ramp == 0


def test_a_huge_ramp_is_counted_without_walking_through_it() -> None:
    """Steps of 4, 8 and 12 samples, each for a third of 3 * 2^38 samples."""
    third = 2**38
    sizes = batch_sizes(16, (4, 4, 3 * third))
    in_eights = third // 8
    in_twelves = -(-third // 12)
    assert sizes.samples_after(third // 4) == third
    assert sizes.steps_of_ramp == third // 4 + in_eights + in_twelves
    assert "from 4 to 16 samples by 4 over 824,633,720,832 samples" in describe_ramp(sizes)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ([16, 4, 64], r"\[16, 4, 64\] starts with 16 samples, and train.global_batch_size=16"),
        ([4, 5, 64], r"steps of 5 from 4 do not reach train.global_batch_size=16; .* the 12"),
        ([6, 2, 64], r"a batch of 6 samples is not a multiple of micro batch 2 x data parallel 2"),
        ([4, 6, 64], r"a batch of 10 samples is not a multiple of .* multiples of 4"),
        ([[0, 4], [9, 6], [50, 16]], r"a batch of 6 samples is not a multiple of"),
        ([[0, 4], [9, 8]], r"both rising to train.global_batch_size=16"),
        ([[0, 20], [9, 16]], r"\[\[0, 20\], \[9, 16\]\]: expected pairs \[first sample, size\]"),
        ([[1, 4], [9, 16]], "from sample 0 on"),
    ],
)
def test_a_ramp_that_does_not_divide_is_refused(ramp: list[int], message: str) -> None:
    plan = plan_batch(global_batch=16, micro_batch=2, data_parallel=2)
    with pytest.raises(ConfigError, match=message):
        check_ramp(plan, ramp)
    check_ramp(plan, [4, 4, 64])
    check_ramp(plan, None)


def test_too_many_increments_are_refused() -> None:
    with pytest.raises(ConfigError, match="1048575 increments; at most 65536"):
        batch_sizes(2**20, [1, 1, 64])

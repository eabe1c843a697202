"""Sizes of the global batch along a run: constant, or growing at its start.

The ramp is Megatron's ``--rampup-batch-size START INCREMENT SAMPLES``, or its
``--step-batch-size-schedule`` in samples (``megatron/core/num_microbatches_calculator.py``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from common.errors import ConfigError
from common.parallel.batch import BatchPlan, divisors

MAX_INCREMENTS = 2**16
"""Most increments of a ramp: far more than a run has batches of different sizes."""


Ramp = Sequence[int | Sequence[int]]
"""Three numbers (start, increment, samples), or pairs (first sample, size)."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Size of the global batch by the samples consumed so far.

    steps: pairs (first sample, size) from sample 0 on; the last size is the full one. A short ramp
    jumps sizes, which begin with the same sample as the next one. increments: the three numbers of
    a ramp that has them.
    """

    steps: tuple[tuple[int, int], ...]
    increments: tuple[int, int, int] | None = None

    @property
    def grows(self) -> bool:
        return len(self.steps) > 1

    @property
    def all(self) -> list[int]:
        """Return all sizes in ascending order, those that are jumped too."""
        return [size for _, size in self.steps]

    def at(self, consumed_samples: int) -> int:
        """Return the size of the batch that starts at a sample."""
        known = bisect_right(self.steps, max(0, consumed_samples), key=lambda step: step[0])
        return self.steps[known - 1][1]

    def samples_after(self, steps: int) -> int:
        """Return the samples that so many steps from the start of a run consume."""
        stage = self._stages[bisect_right(self._stages, steps, key=lambda it: it.step) - 1]
        return stage.samples + (steps - stage.step) * stage.size

    def steps_within(self, samples: int) -> int:
        """Return the steps from the start of a run that consume at most so many samples."""
        stage = self._stages[bisect_right(self._stages, samples, key=lambda it: it.samples) - 1]
        return stage.step + (samples - stage.samples) // stage.size

    @property
    def steps_of_ramp(self) -> int:
        """Return the steps before the first full batch."""
        return self._stages[-1].step

    @cached_property
    def _stages(self) -> tuple[_Stage, ...]:
        """Return the sizes that an undisturbed run has, in order."""
        stages, step, samples = [], 0, 0
        for (_, size), (end, _) in pairwise(self.steps):
            if (steps := -((samples - end) // size)) > 0:
                stages.append(_Stage(step=step, samples=samples, size=size))
                step, samples = step + steps, samples + steps * size
        return (*stages, _Stage(step=step, samples=samples, size=self.steps[-1][1]))


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Steps of one size. step, samples: those done before the first of them."""

    step: int
    samples: int
    size: int


def batch_sizes(full: int, ramp: Ramp | None) -> BatchSizes:
    """Return the sizes of train.global_batch_size and train.rampup_batch_size.

    Raises ConfigError unless the ramp ends at the full batch.
    """
    if ramp is None:
        return BatchSizes(steps=((0, full),))
    named = f"train.rampup_batch_size={list(ramp)}"
    if steps := _steps(ramp):
        firsts, sizes = zip(*steps, strict=True)
        rising = all(a < b for each in (firsts, sizes) for a, b in pairwise(each))
        if firsts[0] != 0 or not rising or sizes[-1] != full:
            raise ConfigError(
                f"{named}: expected pairs [first sample, size] from sample 0 on, both rising to"
                f" train.global_batch_size={full}"
            )
        return BatchSizes(steps=steps)
    start, increment, samples = _numbers(ramp)
    if start >= full:
        raise ConfigError(
            f"{named} starts with {start} samples, and train.global_batch_size={full} is not above"
            " that; lower the start, or leave the key out"
        )
    if (full - start) % increment:
        raise ConfigError(
            f"{named}: steps of {increment} from {start} do not reach"
            f" train.global_batch_size={full}; give an increment that divides the"
            f" {full - start} in between"
        )
    if (full - start) // increment > MAX_INCREMENTS:
        raise ConfigError(
            f"{named}: has {(full - start) // increment} increments; at most {MAX_INCREMENTS} are"
            " supported; raise the increment"
        )
    steps = ((0, start), *_first_samples(start, increment, samples, full))
    return BatchSizes(steps=steps, increments=(start, increment, samples))


def _first_samples(start: int, increment: int, samples: int, full: int) -> Iterator[tuple[int, int]]:
    """Yield the first sample of each size above ``start``, and the size."""
    count = (full - start) // increment
    # Megatron's own order of divisions decides where a quotient is rounded
    per_increment = samples / count
    for number in range(1, count + 1):
        first = samples * number // count
        while int(first / per_increment) >= number:
            first -= 1
        while int(first / per_increment) < number:
            first += 1
        yield min(first, samples + 1), start + number * increment


def _steps(ramp: Ramp) -> tuple[tuple[int, int], ...]:
    """Return the pairs of a ramp; a ramp of three numbers has none."""
    return tuple((pair[0], pair[1]) for pair in ramp if not isinstance(pair, int))


def _numbers(ramp: Ramp) -> list[int]:
    return [number for number in ramp if isinstance(number, int)]


def micro_batches(full: int, ramp: Ramp | None, data_parallel: int) -> tuple[int, ...]:
    """Return the micro batches that divide every batch over the ranks, in ascending order.

    It is 1 where the ranks do not even divide the batches.
    """
    ramp = ramp or ()
    common = math.gcd(full, *_numbers(ramp)[:2], *(size for _, size in _steps(ramp)))
    return (1,) if common % data_parallel else divisors(common // data_parallel)


def describe_ramp(sizes: BatchSizes) -> str:
    """Return the growth of the batch as text, with the steps that it takes."""
    end = f"full after step {sizes.steps_of_ramp}"
    (_, start), *steps = sizes.steps
    if sizes.increments is None:
        later = "".join(f", {size} from sample {first:,}" for first, size in steps)
        return f"{start} samples{later}; {end}"
    _, increment, samples = sizes.increments
    return f"from {start} to {steps[-1][1]} samples by {increment} over {samples:,} samples, {end}"


def check_ramp(batch: BatchPlan, ramp: Ramp | None) -> None:
    """Raise ConfigError unless the ramp ends at the full batch, and each batch of it divides into
    micro batches of all data-parallel ranks.
    """
    part = batch.micro_batch * batch.data_parallel
    wrong = next((size for size in batch_sizes(batch.global_batch, ramp).all if size % part), None)
    if wrong is not None:
        raise ConfigError(
            f"train.rampup_batch_size={list(ramp or ())}: a batch of {wrong} samples is not a"
            f" multiple of micro batch {batch.micro_batch} x data parallel {batch.data_parallel} ="
            f" {part}; give a start and an increment that are multiples of {part}, or lower"
            " train.micro_batch_size"
        )


def epochs_done(step: int, batches: BatchSizes, samples_per_epoch: int) -> int:
    """Return how many epochs have ended after ``step``.

    The last step of epoch n is the last one whose samples all lie in the first n epochs, as for
    train.max_epochs=n.
    """
    return (batches.samples_after(step + 1) - 1) // samples_per_epoch


def place_in_epochs(step: int, batches: BatchSizes, samples_per_epoch: int) -> tuple[int, int, int]:
    """Return the epoch of a step, its place in it, both from 0, and how many steps the epoch has.

    Epochs end as in epochs_done, so they differ in length by a step, and more while the batch
    grows.
    """
    epoch = epochs_done(step - 1, batches, samples_per_epoch)
    before = batches.steps_within(epoch * samples_per_epoch)
    steps = batches.steps_within((epoch + 1) * samples_per_epoch) - before
    return epoch, step - 1 - before, steps

"""Arithmetic of batch and layout, and checks that sizes divide each other.

The global batch is micro batch x data parallel x accumulation. It is constant, or grows at the start
of a run. The ramp is Megatron's ``--rampup-batch-size START INCREMENT SAMPLES``, or its
``--step-batch-size-schedule`` in samples (``megatron/core/num_microbatches_calculator.py``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import itemgetter

from common.errors import ConfigError

MAX_RANKS = 2**18
"""Most processes of a run: more than any cluster has, and few enough to list."""
MAX_INCREMENTS = 2**16
"""Most increments of a ramp: more sizes of a batch than any run has, and few enough to list."""


def plan_batch(
    global_batch: int | None, micro_batch: int | None, accumulation: int | None, data_parallel: int
) -> tuple[int, int, int]:
    """Return global batch, micro batch and accumulation. None marks a number to derive.

    Accumulation is 1 if only the micro batch or only the global batch is given. Raises ConfigError
    naming the numbers that contradict each other.
    """
    if global_batch is None and micro_batch is None:
        raise ConfigError("train.micro_batch_size and train.global_batch_size are both left out; give at least one")
    if global_batch is None:
        assert micro_batch is not None
        accumulation = accumulation or 1
        global_batch = micro_batch * data_parallel * accumulation
    elif micro_batch is None:
        accumulation = accumulation or 1
        micro_batch = _quotient(
            global_batch, "data parallel x accumulation", data_parallel * accumulation, "micro batch"
        )
    elif accumulation is None:
        accumulation = _quotient(
            global_batch, "micro batch x data parallel", micro_batch * data_parallel, "accumulation"
        )
    elif (product := micro_batch * data_parallel * accumulation) != global_batch:
        raise ConfigError(
            f"train.global_batch_size={global_batch} is not micro batch {micro_batch} x data parallel {data_parallel}"
            f" x accumulation {accumulation} = {product}; change one of them or leave one out"
        )
    return global_batch, micro_batch, accumulation


def _quotient(whole: int, what: str, part: int, wanted: str) -> int:
    if whole % part:
        below = whole // part * part
        choices = f"{below} or {below + part}" if below else str(part)
        raise ConfigError(
            f"train.global_batch_size={whole} is not a multiple of {what} = {part}, so {wanted}"
            f" cannot be derived; choose {choices}"
        )
    return whole // part


def plan_data_parallel(data: int | None, tensor: int, pipeline: int, world_size: int) -> int:
    """Return the data-parallel ranks: those left after tensor and pipeline parallelism.

    Raises ConfigError unless data x tensor x pipeline equals ``world_size`` exactly, and for more ranks than MAX_RANKS.
    """
    factors = f"parallel.model_parallel={tensor} x parallel.pipeline_stage={pipeline}"
    split = tensor * pipeline
    if world_size > MAX_RANKS:
        raise ConfigError(
            f"a run of {world_size} ranks is asked for, and {MAX_RANKS} is the most here; lower the parallel sizes"
        )
    if data is not None and data * split != world_size:
        raise ConfigError(
            f"parallel.data_parallel={data} x {factors} = {data * split} processes, but {world_size}"
            " are running; start that many, or leave data_parallel out"
        )
    if world_size % split:
        raise ConfigError(
            f"{factors} = {split} does not divide the {world_size} running process{'es' if world_size > 1 else ''}"
        )
    return world_size // split


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Raise ConfigError unless ``part`` divides ``whole``, naming both and the divisors to choose from."""
    if whole % part:
        found = divisors(whole)
        several = len(found) > _DIVISORS_SHOWN
        near = sorted(sorted(found, key=lambda number: abs(number - part))[:_DIVISORS_SHOWN]) if several else found
        choices = " or ".join(filter(None, [", ".join(map(str, near[:-1])), str(near[-1])]))
        raise ConfigError(
            f"{part_name}={part} does not divide {whole_name}={whole}; choose"
            f" {choices}{', or another' if several else ''}"
        )


_DIVISORS_SHOWN = 12


@lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order, found up to its square root."""
    small = [part for part in range(1, math.isqrt(number) + 1) if number % part == 0]
    return (*small, *(number // part for part in reversed(small) if part * part != number))


def pad_vocabulary(vocab_size: int, multiple: int, model_parallel: int = 1) -> int:
    """Return the rows of the embedding table.

    They are ``vocab_size`` rounded up to a multiple of ``multiple * model_parallel`` (Megatron's rule).
    """
    step = multiple * model_parallel
    return -(-vocab_size // step) * step


Ramp = Sequence[int | Sequence[int]]
"""Three numbers (start, increment, samples), or pairs (first sample, size)."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Size of the global batch by the samples consumed so far.

    steps: pairs (first sample, size) from sample 0 on; the last size is the full one. A short ramp jumps sizes, which
    begin with the same sample as the next one. increments: the three numbers of a ramp that has them.
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

    def micro_batches(self, data_parallel: int) -> tuple[int, ...]:
        """Return the micro batches that divide every batch over the ranks, in ascending order.

        It is 1 where the ranks do not even divide the batches.
        """
        common = math.gcd(*self.all)
        return (1,) if common % data_parallel else divisors(common // data_parallel)

    def samples_after(self, steps: int) -> int:
        """Return the samples that so many steps from the start of a run consume."""
        step, samples, size = self._stages[bisect_right(self._stages, steps, key=itemgetter(0)) - 1]
        return samples + (steps - step) * size

    def steps_within(self, samples: int) -> int:
        """Return the steps from the start of a run that consume at most so many samples."""
        step, before, size = self._stages[bisect_right(self._stages, samples, key=itemgetter(1)) - 1]
        return step + (samples - before) // size

    @property
    def steps_of_ramp(self) -> int:
        """Return the steps before the first full batch."""
        return self._stages[-1][0]

    @cached_property
    def _stages(self) -> tuple[tuple[int, int, int], ...]:
        """Return the sizes that an undisturbed run has, in order, each after the steps and samples before it."""
        stages, step, samples = [], 0, 0
        for (_, size), (end, _) in pairwise(self.steps):
            if (steps := -((samples - end) // size)) > 0:
                stages.append((step, samples, size))
                step, samples = step + steps, samples + steps * size
        return (*stages, (step, samples, self.steps[-1][1]))


def batch_sizes(full: int, ramp: Ramp | None) -> BatchSizes:
    """Return the sizes of train.global_batch_size and train.rampup_batch_size.

    Raises ConfigError unless the ramp ends at the full batch.
    """
    if ramp is None:
        return BatchSizes(steps=((0, full),))
    named = f"train.rampup_batch_size={list(ramp)}"
    if steps := tuple((pair[0], pair[1]) for pair in ramp if not isinstance(pair, int)):
        firsts, sizes = zip(*steps, strict=True)
        rising = all(a < b for each in (firsts, sizes) for a, b in pairwise(each))
        if firsts[0] != 0 or not rising or sizes[-1] != full:
            raise ConfigError(
                f"{named}: expected pairs [first sample, size] from sample 0 on, both rising to"
                f" train.global_batch_size={full}"
            )
        return BatchSizes(steps=steps)
    start, increment, samples = (number for number in ramp if isinstance(number, int))
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
    if (count := (full - start) // increment) > MAX_INCREMENTS:
        raise ConfigError(f"{named} has {count} increments, and {MAX_INCREMENTS} is the most; raise the increment")
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


def describe_ramp(sizes: BatchSizes) -> str:
    """Return the growth of the batch as text, with the steps that it takes."""
    end = f"full after step {sizes.steps_of_ramp}"
    (_, start), *steps = sizes.steps
    if sizes.increments is None:
        later = "".join(f", {size} from sample {first:,}" for first, size in steps)
        return f"{start} samples{later}; {end}"
    _, increment, samples = sizes.increments
    return f"from {start} to {steps[-1][1]} samples by {increment} over {samples:,} samples, {end}"


def check_ramp(sizes: BatchSizes, ramp: Ramp | None, micro_batch: int, data_parallel: int) -> None:
    """Raise ConfigError unless each batch divides into micro batches of all data-parallel ranks."""
    part = micro_batch * data_parallel
    wrong = next((size for size in sizes.all if size % part), None)
    if wrong is not None:
        raise ConfigError(
            f"train.rampup_batch_size={list(ramp or ())}: a batch of {wrong} samples is not a multiple of micro batch"
            f" {micro_batch} x data parallel {data_parallel} = {part}; give a start and an increment that"
            f" are multiples of {part}, or lower train.micro_batch_size"
        )


def epochs_done(step: int, batches: BatchSizes, samples_per_epoch: int) -> int:
    """Return how many epochs have ended after ``step``.

    The last step of epoch n is the last one whose samples all lie in the first n epochs, as for train.max_epochs=n.
    """
    return (batches.samples_after(step + 1) - 1) // samples_per_epoch


def place_in_epochs(step: int, batches: BatchSizes, samples_per_epoch: int) -> tuple[int, int, int]:
    """Return the epoch of a step, its place in it, both from 0, and how many steps the epoch has.

    Epochs end as in epochs_done, so they differ in length by a step, and more while the batch grows.
    """
    epoch = epochs_done(step - 1, batches, samples_per_epoch)
    before = batches.steps_within(epoch * samples_per_epoch)
    steps = batches.steps_within((epoch + 1) * samples_per_epoch) - before
    return epoch, step - 1 - before, steps

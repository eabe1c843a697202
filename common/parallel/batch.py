"""Arithmetic of batch and layout, and checks that sizes divide each other.

The global batch is micro batch x data parallel x accumulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from common.errors import ConfigError

MAX_RANKS = 2**18
"""Most processes of a run: more than any cluster has, and few enough to list."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Samples per optimizer step. ``global_batch == micro_batch * data_parallel * accumulation``
    holds.
    """

    global_batch: int
    micro_batch: int
    data_parallel: int
    accumulation: int

    def __str__(self) -> str:
        return (
            f"global batch {self.global_batch} = micro batch {self.micro_batch} x data parallel"
            f" {self.data_parallel} x accumulation {self.accumulation}"
        )


def plan_batch(
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    data_parallel: int,
) -> BatchPlan:
    """Complete the numbers of a batch; None marks a number to derive.

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
    plan = BatchPlan(
        global_batch=global_batch, micro_batch=micro_batch, data_parallel=data_parallel, accumulation=accumulation
    )
    product = micro_batch * data_parallel * accumulation
    if product != global_batch:
        raise ConfigError(
            f"train.global_batch_size={global_batch} is not micro batch {micro_batch} x data"
            f" parallel {data_parallel} x accumulation {accumulation} = {product}; change one of"
            " them or leave one out"
        )
    return plan


def _quotient(whole: int, what: str, part: int, wanted: str) -> int:
    if whole % part:
        below = whole // part * part
        choices = f"{below} or {below + part}" if below else str(part)
        raise ConfigError(
            f"train.global_batch_size={whole} is not a multiple of {what} = {part}, so {wanted}"
            f" cannot be derived; choose {choices}"
        )
    return whole // part


def plan_data_parallel(*, world_size: int, model_parallel: int, pipeline_stage: int, data_parallel: int | None) -> int:
    """Return the data-parallel ranks: those left after tensor and pipeline parallelism.

    Raises ConfigError unless data x tensor x pipeline equals ``world_size`` exactly, and for more
    ranks than MAX_RANKS.
    """
    split = model_parallel * pipeline_stage
    if world_size > MAX_RANKS:
        raise ConfigError(
            f"a run of {world_size} ranks is asked for, and {MAX_RANKS} is the most here; lower the parallel sizes"
        )
    if data_parallel is not None and data_parallel * split != world_size:
        raise ConfigError(
            f"parallel.data_parallel={data_parallel} x parallel.model_parallel={model_parallel} x"
            f" parallel.pipeline_stage={pipeline_stage} = {data_parallel * split} processes, but"
            f" {world_size} are running; start that many, or leave data_parallel out"
        )
    if world_size % split:
        raise ConfigError(
            f"parallel.model_parallel={model_parallel} x parallel.pipeline_stage={pipeline_stage} ="
            f" {split} does not divide the {world_size} running"
            f" process{'es' if world_size > 1 else ''}"
        )
    return world_size // split


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Raise ConfigError unless ``part`` divides ``whole``, naming both and the divisors to choose
    from.
    """
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

    They are ``vocab_size`` rounded up to a multiple of ``multiple * model_parallel`` (Megatron's
    rule).
    """
    step = multiple * model_parallel
    return -(-vocab_size // step) * step

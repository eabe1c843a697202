"""Choice of the micro batch for train.micro_batch_size=auto, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from common.cluster.environment import Process
from common.device import Device
from common.errors import ConfigError
from common.log import LOG
from common.parallel.fused_attention import with_attention
from common.parallel.resolved_run import TrainingRun
from common.parallel.world import WorldBase
from common.planner.fitting import choices, largest_by_plan, rank_memory
from common.planner.room import advice, gibibytes
from common.resolve.derive import with_micro_batch
from common.training.data import TrainingData
from common.training.start import kept_micro_batch

Opened = tuple[TrainingData, TrainingRun]
Trial = Callable[[TrainingRun], bool]
"""Function that tells whether a step of a run fits on this rank's device."""


def settle_micro_batch(
    opened: Opened,
    world: WorldBase,
    process: Process,
    device: Device,
    reopen: Callable[[TrainingRun], Opened],
    trial: Trial | None = None,
) -> Opened:
    """Return data and run with the micro batch that is chosen, if the run leaves it open.

    A resume keeps the one of its checkpoint while batch and layout are equal. Otherwise the plan
    chooses for the memory of each rank, and a trial may halve it. All ranks take the smallest.
    reopen: opens the data of the run, whose validation windows have this batch too. Raises
    ConfigError if not even the smallest one passes the trial.
    """
    _, config = opened
    if not config.train.micro_batch_is_auto:
        return opened
    size = world.decide_on_rank_0(lambda: kept_micro_batch(config, choices(config)))
    reason = "as the checkpoint that is resumed"
    if size is None:
        memory = device.total_memory()
        limit = rank_memory(
            config,
            kind=device.kind,
            device_memory=memory,
            ranks=min(process.local_world_size, world.size),
        )
        here = with_attention(config, device.kind, device.name)
        size = min(world.gather(largest_by_plan(here, limit, device_memory=memory)))
        reason = "the largest one" if limit is None else f"by the plan for {gibibytes(limit)}"
        if trial is not None:
            size = _largest_that_passes(config, size, world, trial)
            reason += " and a step on the device"
    config = with_micro_batch(config, size)
    LOG.info(
        f"train.micro_batch_size=auto: {size} samples, {reason}; accumulation"
        f" {config.train.accumulation_steps}, global batch {config.train.global_batch_size}"
    )
    return reopen(config)


def _largest_that_passes(config: TrainingRun, size: int, world: WorldBase, trial: Trial) -> int:
    """Return the first size that passes on all ranks, halved until then."""
    sizes = choices(config)
    while not all(world.gather(trial(with_micro_batch(config, size)))):
        smaller = [each for each in sizes if 2 * each <= size]
        if not smaller:
            raise ConfigError(
                f"train.micro_batch_size=auto: a step with {size} samples, the fewest possible, is"
                f" out of memory; {advice(with_micro_batch(config, size))}"
            )
        LOG.info(
            f"train.micro_batch_size=auto: {size} samples are out of memory; {smaller[-1]} are"
            " tried"
        )
        size = smaller[-1]
    return size

"""Choice of micro batch and recomputation where a run has auto for them, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from common.accelerators import find_accelerator
from common.cluster.environment import Process
from common.device import Device
from common.errors import ConfigError
from common.log import LOG
from common.parallel.fused_attention import with_attention
from common.parallel.resolved_run import ResolvedRun, TrainingRun
from common.parallel.world import WorldBase
from common.planner.fitting import RECOMPUTATIONS, choices, fitting_by_plan, rank_memory
from common.planner.room import advice, gibibytes
from common.resolve.derive import with_micro_batch, with_recompute
from common.training.data import TrainingData
from common.training.start import kept_choice

Opened = tuple[TrainingData, TrainingRun]
Trial = Callable[[TrainingRun], bool]
"""Function that tells whether a step of a run fits on this rank's device."""
Choice = tuple[int, str, int | None]
"""Micro batch, recomputation, and the blocks of a stage that recompute."""


def settle_auto(
    opened: Opened,
    world: WorldBase,
    process: Process,
    device: Device,
    reopen: Callable[[TrainingRun], Opened],
    trial: Trial | None = None,
) -> Opened:
    """Return data and run with what the run leaves open chosen.

    A resume keeps the choice of its checkpoint while batch and layout are equal. Otherwise the plan
    chooses for the memory of each rank, and a trial may ask for less. All ranks take the choice of
    the one with the least memory. reopen: opens the data of the run, whose validation windows have
    this batch too. Raises ConfigError if not even the choice that needs least passes the trial.
    """
    _, written = opened
    train = written.train
    if not (train.micro_batch_is_auto or train.recompute_is_auto):
        return opened
    kept = world.decide_on_rank_0(lambda: kept_choice(written, choices(written)))
    if kept is not None:
        config, reason = _chosen(written, kept), "as the checkpoint that is resumed"
    else:
        memory = device.total_memory()
        limit = rank_memory(
            written,
            kind=device.kind,
            device_memory=memory,
            ranks=min(process.local_world_size, world.size),
        )
        fitting = fitting_by_plan(
            with_attention(written, device.kind, device.name),
            limit,
            device=find_accelerator(device.name),
            device_memory=memory,
        )
        limit, choice = min(world.gather((limit, _choice(fitting))), key=_limit)
        config = _chosen(written, choice)
        reason = "for any memory" if limit is None else f"by the plan for {gibibytes(limit)}"
        if trial is not None:
            config = _first_that_passes(config, written, world, trial)
            reason += " and a step on the device"
    _log(config, written, reason)
    return reopen(config)


def _choice(config: ResolvedRun) -> Choice:
    train = config.train
    return train.micro_batch_size, train.recompute, train.recompute_layers


def _limit(found: tuple[float | None, Choice]) -> float:
    limit, _ = found
    return inf if limit is None else limit


def _chosen(written: TrainingRun, choice: Choice) -> TrainingRun:
    """Return the run with a choice, as far as it leaves that open."""
    size, mode, layers = choice
    config = written
    if written.train.recompute_is_auto:
        config = with_recompute(config, mode, layers)
    if written.train.micro_batch_is_auto:
        config = with_micro_batch(config, size)
    return config


def _first_that_passes(
    config: TrainingRun, written: TrainingRun, world: WorldBase, trial: Trial
) -> TrainingRun:
    """Return the first choice that passes on all ranks: halved, then with more recomputation."""
    while not all(world.gather(trial(config))):
        less = _less(config, written)
        if less is None:
            size, mode, _ = _choice(config)
            raise ConfigError(
                f"train.{' and '.join(_open_keys(written))}=auto: a step with {size} samples and"
                f" recompute={mode}, the least possible, is out of memory; {advice(config)}"
            )
        LOG.info(f"{_words(config)}: out of memory; {_words(less)} is tried")
        config = less
    return config


def _less(config: TrainingRun, written: TrainingRun) -> TrainingRun | None:
    """Return the run with the next choice that needs less memory, or None."""
    size, mode, layers = _choice(config)
    if written.train.micro_batch_is_auto:
        smaller = [each for each in choices(written) if 2 * each <= size]
        if smaller:
            return with_micro_batch(config, smaller[-1])
    if written.train.recompute_is_auto:
        if layers is not None:
            return with_recompute(config, mode)
        more = RECOMPUTATIONS[RECOMPUTATIONS.index(mode) + 1 :]
        return with_recompute(config, more[0]) if more else None
    return None


def _open_keys(written: TrainingRun) -> list[str]:
    train = written.train
    keys = {"micro_batch_size": train.micro_batch_is_auto, "recompute": train.recompute_is_auto}
    return [key for key, is_auto in keys.items() if is_auto]


def _words(config: TrainingRun) -> str:
    size, mode, layers = _choice(config)
    blocks = "" if layers is None else f" in {layers} blocks of a stage"
    return f"micro batch {size}, recompute {mode}{blocks}"


def _log(config: TrainingRun, written: TrainingRun, reason: str) -> None:
    train = config.train
    LOG.info(
        f"train.{' and '.join(_open_keys(written))}=auto: {_words(config)}, {reason}; accumulation"
        f" {train.accumulation_steps}, global batch {train.global_batch_size}"
    )

"""Rewinds: after a spike, training continues from an earlier checkpoint without its batch.

PaLM (Chowdhery et al. 2022, section 5.1) did so by hand: back to a checkpoint before the spike, and
past the batches seen before and during it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.folders import step_of, whole_checkpoints
from common.checkpoint.state import TrainState
from common.errors import CheckpointError, DivergedError
from common.log import LOG
from common.parallel.run import Run
from common.training.opened_checkpoint import Checkpoint


class RewindNeeded(Exception):
    """Raised by the loop on every rank after the same step. state: of the run after that step."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(f"step {state.step}")
        self.state = state


def require_no_rewind(
    config: Run, state: TrainState, row: Mapping[str, Any], *, has_saved: bool
) -> None:
    """Raise RewindNeeded if the run has to go back after the step of ``row``.

    has_saved: whether the run folder holds a checkpoint. Before the first one, an outlier is only
    reported. Raises DivergedError beyond train.max_rewinds.
    """
    train = config.train
    if train.on_outlier != "rewind" or not (row["outlier"] or _is_broken(config, row)):
        return
    if not has_saved:
        LOG.warning(f"step {state.step}: no rewind, since there is no checkpoint yet")
        return
    if state.rewinds >= train.max_rewinds:
        raise DivergedError(
            f"step {state.step}: loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g} after"
            f" {state.rewinds} rewinds (train.max_rewinds); lower optimizer.learning_rate, raise"
            " train.rewind_batches, or look at the data. Earlier checkpoints are complete"
        )
    raise RewindNeeded(state)


def _is_broken(config: Run, row: Mapping[str, Any]) -> bool:
    """Return whether a value is not finite, beyond what a dynamic loss scale causes."""
    if config.loss_scale.mode == "dynamic":
        return not math.isfinite(row["loss"])
    return not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))


def checkpoint_before(folder: Path, step: int) -> Checkpoint:
    """Return the newest checkpoint up to ``step`` whose last update was not an outlier.

    If there is none, the oldest one. Raises CheckpointError if there is no checkpoint at all.
    """
    there = [Checkpoint(path) for path in whole_checkpoints(folder)]
    if not there:
        raise CheckpointError(
            f"{folder}: no complete checkpoint to go back to, though one was written; the run"
            " cannot continue"
        )
    before = (each for each in reversed(there) if step_of(each.path.name) <= step)
    return next((each for each in before if not each.in_spike()), there[0])


def go_back(config: Run, state: TrainState, before: TrainState) -> None:
    """Carry what the run has learnt from its rewinds into the state of the checkpoint.

    state: of the checkpoint, changed in place. before: of the run at the outlier.
    """
    last = before.consumed_samples
    first = config.batch_sizes.start_of_batches(last, config.train.rewind_batches)
    state.left_out = _merged([*before.left_out, [max(first, state.consumed_samples), last]])
    state.rewinds = before.rewinds + 1
    state.rate_factor = before.rate_factor * config.train.rewind_rate
    lowered = f", at {state.rate_factor:g} x the learning rate" if state.rate_factor < 1.0 else ""
    LOG.warning(
        f"step {before.step}: rewind {state.rewinds} of {config.train.max_rewinds}: back to step"
        f" {state.step}, without the samples {max(first, state.consumed_samples)} to"
        f" {last - 1}{lowered}"
    )


def _merged(ranges: list[list[int]]) -> list[list[int]]:
    """Return ranges in order, with those that touch joined."""
    found: list[list[int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1][1] = max(found[-1][1], last)
        else:
            found.append([first, last])
    return found

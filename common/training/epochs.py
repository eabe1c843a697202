"""Ends of epochs among the steps of a run."""

from __future__ import annotations

from common.parallel.ramp import BatchSizes


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

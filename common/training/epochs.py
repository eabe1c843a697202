"""Ends of epochs among the steps of a run."""

from __future__ import annotations

from common.parallel.ramp import BatchSizes


def epochs_done(step: int, batches: BatchSizes, samples_per_epoch: int) -> int:
    """Return how many epochs have ended after ``step``.

    The last step of epoch n is the last one whose samples all lie in the first n epochs, as for
    train.max_epochs=n.
    """
    return (batches.samples_after(step + 1) - 1) // samples_per_epoch

"""Ends of epochs among the steps of a run."""

from __future__ import annotations


def epochs_done(step: int, batch: int, samples_per_epoch: int) -> int:
    """Return how many epochs have ended after ``step``.

    The last step of epoch n is the last one whose samples all lie in the first n epochs, as for
    train.max_epochs=n.
    """
    return ((step + 1) * batch - 1) // samples_per_epoch

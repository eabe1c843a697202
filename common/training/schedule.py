"""Learning rate as a pure function of the step, the same for both backends."""

from __future__ import annotations

import math

from common.config.resolved import TimedOptimizer


def learning_rate(optimizer: TimedOptimizer, step: int) -> float:
    """Return the learning rate of an optimizer step; the first step is 1.

    Linear warm-up reaches the peak at ``warmup_steps``. The decay reaches ``min_learning_rate`` at
    ``decay_steps`` and stays there.
    """
    peak, floor = optimizer.learning_rate, optimizer.min_learning_rate
    warmup, decay = optimizer.warmup_steps, optimizer.decay_steps
    if step <= warmup:
        return peak * step / warmup
    if optimizer.schedule == "constant":
        return peak
    if step >= decay:
        return floor
    progress = (step - warmup) / (decay - warmup)
    if optimizer.schedule == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        shape = math.pow(
            1.0 - progress, optimizer.power if optimizer.schedule == "polynomial" else 1.0
        )
    return floor + (peak - floor) * shape

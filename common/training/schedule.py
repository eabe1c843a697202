"""Place of a run in its learning-rate schedule, and the rate of the next update."""

from __future__ import annotations

from common.checkpoint.state import TrainState
from common.config.resolved import ResolvedOptimizer
from common.parallel.learning_rate import learning_rate


class Schedule:
    """Schedule that moves with the updates that are made, and not with steps that are skipped."""

    def __init__(self, optimizer: ResolvedOptimizer, state: TrainState) -> None:
        self._optimizer = optimizer
        self._position = optimizer.schedule_start + (
            state.updated_samples if self._by_samples else state.step - state.skipped_steps
        )

    @property
    def _by_samples(self) -> bool:
        return self._optimizer.schedule_unit == "samples"

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        return self.rates(1)[0]

    def rates(self, count: int, samples: int = 0) -> list[float]:
        """Return the rates of the next ``count`` updates, each with so many samples."""
        step = samples if self._by_samples else 1
        return [
            learning_rate(self._optimizer, self._position + number * step)
            for number in range(count)
        ]

    def advance(self, samples: int) -> None:
        """Move on after an update with so many samples."""
        self._position += samples if self._by_samples else 1

"""Interface of an engine, a model with its optimizer on some devices, and its learning rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from common.checkpoint.snapshot import TrainState
from common.checkpoint.writer import Snapshot
from common.config.resolved import ResolvedOptimizer
from common.dataset import Batch, Tokens
from common.parallel.learning_rate import learning_rate
from common.training.outliers import NO_LIMITS, Limits
from common.training.start import Start


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
        return [learning_rate(self._optimizer, self._position + number * step) for number in range(count)]

    def advance(self, samples: int) -> None:
        """Move on after an update with so many samples."""
        self._position += samples if self._by_samples else 1


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one optimizer step, over all ranks."""

    loss: float
    """Mean loss of the global batch, nats per token."""
    grad_norm: float
    """Global gradient norm before clipping, without the loss scale."""
    learning_rate: float
    """Rate of this update, or of the one that was skipped."""
    loss_scale: float
    skipped: bool
    """Whether the weights did not change, because the gradient was not finite or beyond the limits.
    """
    seconds: float | None = None
    """Time that the device took. Where it is None, the host sees when a step ends."""


class Engine(ABC):
    """Engine of a run, created on every rank, then started by ``begin``, then asked for steps."""

    steps_per_run: int
    """Preferred number of steps in a call of ``run``: 1, or the sink size of a graph that loops."""
    schedule: Schedule
    """Learning rate of the next update, set by ``begin``."""

    @abstractmethod
    def begin(self, start: Start) -> TrainState:
        """Fill weights, optimizer and random generators; return the state to train from.

        They come from the checkpoint to resume. Without one, the weights are those of
        ``start.weights`` or the initial ones, and no samples are read yet. Raises CheckpointError.
        """

    def identity(self) -> dict[str, Any]:
        """Return facts that must be equal on every rank, beyond the config, the data and the
        state.
        """
        return {}

    def kernels(self) -> dict[str, str]:
        """Return the kernels that parts of a step run, for config.yaml. Call it after ``begin``."""
        return {}

    @abstractmethod
    def norm_of_weights(self) -> float:
        """Return the norm of this rank's weights, equal on ranks with the same weights."""

    @abstractmethod
    def norm_of_moments(self) -> float:
        """Return the norm of this rank's optimizer state; 0 before the first step."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Return the bytes of weights and optimizer state that this rank holds, as the framework
        has them. Before the first step an optimizer may have no state.
        """

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch as ``run`` takes it best. Called in the thread that reads ahead."""
        return batch

    @abstractmethod
    def run(self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS) -> list[StepResult]:
        """Take ``steps`` batches and start as many optimizer steps.

        Returns the results that are known, in the order of the steps. An engine may keep those of
        the last steps, which its device still computes, for the next call or for ``finish``. A step
        beyond the limits does not change weights and optimizer.
        """

    def finish(self) -> list[StepResult]:
        """Wait for the steps under way and return their results. Call it before ``evaluate`` and
        ``snapshot`` where ``run`` returned fewer results than steps.
        """
        return []

    @abstractmethod
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """Return the summed loss of all predicted tokens of all ranks, in nats, and their
        number.
        """

    @abstractmethod
    def snapshot(self, state: TrainState) -> Snapshot | None:
        """Return everything needed to resume from ``state``; None on ranks that need not write.

        The snapshot before must have been written.
        """

"""What a training run asks of an engine: a model with its optimizer, on some devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from common.dataset import Batch, Tokens
from common.training.checkpoint_writer import Snapshot
from common.training.outliers import NO_LIMITS, Limits
from common.training.start import Start
from common.training.state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, over all ranks."""

    loss: float
    """Mean loss of the global batch, nats per token."""
    grad_norm: float
    """Global gradient norm before clipping, the loss scale taken out."""
    learning_rate: float
    loss_scale: float
    skipped: bool
    """Whether the weights stayed as they were: the gradient was not finite or beyond the limits."""


class Engine(ABC):
    """Made on every rank, then begun, then asked for steps."""

    steps_per_run: int
    """Preferred number of steps in a call of ``run``: 1, or the sink size of a graph that loops."""

    @abstractmethod
    def begin(self, start: Start) -> TrainState:
        """Fill weights, optimizer and random generators; return the state to train from.

        They come from the checkpoint to resume. Without one the weights are those of
        ``start.weights``, or the initial ones, and nothing is read yet. Raises CheckpointError.
        """

    def identity(self) -> dict[str, Any]:
        """Return what must be the same on every rank, beyond the config, the data and the state."""
        return {}

    @abstractmethod
    def norm_of_weights(self) -> float:
        """Return the norm of what this rank holds; ranks that hold the same have the same."""

    @abstractmethod
    def norm_of_moments(self) -> float:
        """Return the same for the optimizer's state; 0 before the first step."""

    @abstractmethod
    def run(
        self, batches: Iterator[Batch], steps: int, limits: Limits = NO_LIMITS
    ) -> list[StepResult]:
        """Take ``steps`` batches and make as many optimizer steps.

        A step beyond the limits leaves weights and optimizer as they are.
        """

    @abstractmethod
    def evaluate(self, batches: Iterable[Tokens]) -> tuple[float, int]:
        """Return the summed loss of all predicted tokens of all ranks, in nats, and their
        number.
        """

    @abstractmethod
    def snapshot(self, state: TrainState) -> Snapshot | None:
        """Return everything needed to go on from ``state``; None on ranks that need not write.

        Tensors may be lent until the next update.
        """

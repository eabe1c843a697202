"""When a checkpoint is written: never of a run that diverges, whose weights must not take the place
of good ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from common.log import LOG
from common.processes.heartbeat import beat
from common.training.checkpoint_writer import CheckpointWriter, Snapshot
from common.training.state import TrainState

SANE_LOSS = 10.0
"""A loss up to so many times that of a uniform guess, ln(vocabulary), shows that the weights before
the step were good.
"""


class Saver:
    """Saves through ``writer`` what ``take`` returns. Tell it every step.

    Weights are those after a step, and the loss of the next step, or a validation, is the first
    that they give. So: nothing is saved after a step whose loss is not finite, nor where every step
    since the last save was skipped; and the newest checkpoint whose weights gave a sane loss is not
    pruned, whatever comes after it.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        take: Callable[[TrainState], Snapshot | None],
        *,
        vocabulary: int,
        saved_step: int | None,
    ) -> None:
        """saved_step: of the checkpoint in the run's own folder from which it goes on."""
        self.saved_step = saved_step
        self._writer, self._take = writer, take
        self._most = SANE_LOSS * math.log(max(vocabulary, 3))
        self._loss = 0.0
        self._validation = (-1, 0.0)
        """Step and loss."""
        self._learnt = False
        """Whether a step since the last save changed the weights."""
        self._told = False
        self.is_postponed = False
        if saved_step is not None:
            writer.resume(saved_step)

    def step(self, row: Mapping[str, Any]) -> None:
        """Take note of a step that was made."""
        self._learnt |= not row["skipped"]
        self._loss = row["loss"]
        self._judge(row["step"] - 1, self._loss)

    def validation(self, row: Mapping[str, Any]) -> None:
        """Take note of a validation."""
        self._validation = row["step"], row["validation_loss"]
        self._judge(*self._validation)

    def loss_of(self, step: int) -> float:
        """Return the loss of a validation after ``step``, the last one that was made; else the loss
        of the step itself.
        """
        return self._validation[1] if self._validation[0] == step else self._loss

    def _judge(self, step: int, loss: float) -> None:
        if math.isfinite(loss) and loss <= self._most:
            self._writer.confirm(step)

    def why_not(self) -> str:
        """Return why the weights are not to be saved; empty where they are."""
        if not math.isfinite(self._loss):
            return f"the loss is {self._loss}"
        if not self._learnt:
            return "every step since the last checkpoint was skipped"
        return ""

    def save_unless_diverging(self, state: TrainState) -> None:
        """Save, or say once why not and postpone it."""
        reason = self.why_not()
        if reason:
            if not self._told:
                LOG.warning(
                    f"step {state.step}: no checkpoint is written: {reason}; those that are there"
                    " stay as they are"
                )
            self._told = self.is_postponed = True
            return
        self._save(state)

    def save_last(self, state: TrainState) -> None:
        """Save the end of a run whose last loss is finite: no later step will judge its weights."""
        self._judge(state.step, self.loss_of(state.step))
        self._save(state)

    def _save(self, state: TrainState) -> None:
        beat(state.step, "saving")
        snapshot = self._take(state)
        if snapshot is not None:
            self._writer.save(snapshot)
        self.saved_step = state.step
        self._learnt = self._told = self.is_postponed = False
